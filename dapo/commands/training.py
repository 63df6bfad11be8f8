"""`dapo train`, `resume`, `plan`, `profile`: what starts from a recipe or continues a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dapo.config import Config
from dapo.errors import CheckpointError, ConfigError, NotReady
from dapo.system.install import other_package

if TYPE_CHECKING:
    from dapo.terminal.console import Verbosity

QUIET = typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")
VERBOSE = typer.Option("--verbose", "-v", help="Also print the resolved options and the timings of each step.")


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/guess_five.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example optim.lr=1e-5.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue this run from its newest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check what the run needs, print the plan, and exit (code 2: not ready).")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as YAML, usable as a recipe, and exit.")
    ] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Train a model as a recipe says.

    Training the same recipe again starts another run, NAME-2, unless run.name=NAME is given. --resume continues a run
    with its own options, and reads only run.dir and run.name from the recipe.
    """
    verbosity = _verbosity(quiet, verbose)
    config = Config.load(recipe, overrides or ())
    if print_config:
        typer.echo(config.to_yaml(), nl=False)
        return
    if dry_run:
        _dry_run(config, overrides or (), resume, verbosity)
        return
    _check_cluster(config)
    from dapo.terminal.output import log_console

    console = log_console()
    _warn_of_other_package(console)
    # torch and transformers take seconds to import, so only commands that need them import them.
    with console.status("starting"):
        from dapo.training.command import resume_training, start_training
    run = resume_training if resume else start_training
    _exit_on_signal(run(console, config, overrides or (), recipe.stem, verbosity))


def resume_run(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example run.steps=200.")] = None,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Continue a run from its newest checkpoint, with its own options except those given here."""
    from dapo.store.configuration import ablation_of, recorded_config
    from dapo.terminal.output import log_console

    verbosity = _verbosity(quiet, verbose)
    folder = run.resolve() if run.name in ("", "..") else run
    if (ablation := ablation_of(folder)) is not None:
        raise CheckpointError(
            f"{run}: belongs to the ablation in {ablation}, whose result it would change; continue the ablation with "
            "dapo ablate --resume, or copy this folder and resume the copy"
        )
    config = recorded_config(folder, overrides or ()).renamed(folder.name, str(folder.parent))
    _check_cluster(config)
    console = log_console()
    _warn_of_other_package(console)
    with console.status("starting"):
        from dapo.training.command import resume_training
    _exit_on_signal(resume_training(console, config, overrides or (), verbosity=verbosity))


def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/dapo_qwen2.5_32b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example rollout.n=8.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Number of GPUs, or several: 8,128,1024; default: those in the recipe."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, h800, h20, b200, a100, l40s, rtx4090, ...")] = "h200",
    rollout_share: Annotated[
        float | None,
        typer.Option(
            "--rollout-share", help="Share of GPUs that only sample; 0: all take turns; default: as in the recipe."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", help="GPUs of one vLLM engine; 0: as in the recipe, or the fastest.")
    ] = 0,
    mean_response: Annotated[
        float | None, typer.Option("--mean-response", help="Tokens; default: a quarter of the maximum.")
    ] = None,
    mean_prompt: Annotated[float | None, typer.Option("--mean-prompt", help="Tokens; default: 256.")] = None,
    keep_rate: Annotated[
        float | None, typer.Option("--keep-rate", help="Share of the groups that are kept; default: 0.5.")
    ] = None,
    judge_seconds: Annotated[
        float | None,
        typer.Option("--judge-seconds", help="Seconds per response and worker; default: 0.00025, that of math."),
    ] = None,
    network: Annotated[
        float | None, typer.Option("--network", help="GB/s per GPU between nodes; default: that of the GPU's type.")
    ] = None,
) -> None:
    """Estimate memory, seconds per step and the bottleneck of a recipe on N GPUs, without any GPU."""
    from dapo.plan.command import PlanOptions, plan_command

    config = Config.load(recipe, overrides or ())
    sampling = sum(config.rollout_gpus)
    total = config.cluster.learners + sampling
    share = sampling / total if rollout_share is None else rollout_share
    options = PlanOptions(
        gpus or str(total), gpu, share, tensor_parallel, mean_response, mean_prompt, keep_rate, judge_seconds, network
    )
    plan_command(Console(), config, options)


def profile(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/guess_five.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example optim.lr=1e-5.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to profile, after two to warm up.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder for the Chrome traces.")] = Path("profile"),
) -> None:
    """Train a few steps in a temporary directory, and show the kernels that take the most time."""
    config = Config.load(recipe, overrides or ())
    console = Console()
    with console.status("training under the profiler"):
        from dapo.profile import print_phase
        from dapo.profile import profile as profile_steps

        phases = profile_steps(config, out, steps)
    for phase in phases:
        print_phase(console, phase)


def _dry_run(config: Config, overrides: Sequence[str], resume: bool, verbosity: Verbosity) -> None:
    """Print what is there, and the plan; raise with one sentence for each thing that is missing."""
    with Console(stderr=True).status("starting"):
        from dapo.commands.preflight import check_run
        from dapo.plan import plan_text
        from dapo.store.configuration import is_run, recorded_config
        from dapo.store.encoding import visible
    if resume and is_run(config.run_dir):  # with its own options, as a resume does
        config = recorded_config(config.run_dir, overrides).renamed(config.run.name, config.run.dir)
    has_given_name = any(override.startswith("run.name=") for override in overrides)
    found = check_run(config, resume=resume, has_given_name=has_given_name)
    if verbosity == "verbose":
        typer.echo(config.to_yaml())
    if verbosity != "quiet":
        typer.echo(visible("\n".join(["checks:", *found.lines(), plan_text(config)])))
    if found.missing:
        raise NotReady(found.missing)


def _verbosity(quiet: bool, verbose: bool) -> Verbosity:
    if quiet and verbose:
        raise ConfigError("-q and -v contradict each other; give one of them")
    return "quiet" if quiet else "verbose" if verbose else "normal"


def _warn_of_other_package(console: Console) -> None:
    if sentence := other_package():
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _exit_on_signal(number: int | None) -> None:
    if number is not None:
        raise typer.Exit(128 + number)


def _check_cluster(config: Config) -> None:
    """Raise what is wrong with the run directory or the cluster's resources, before seconds are spent on imports."""
    from dapo.cluster.ray_connection import check_room, check_run_dir, needs_ray

    check_run_dir(config)
    if needs_ray(config):
        check_room(config)
