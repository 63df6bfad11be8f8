"""The command line: dapo train | resume | eval | judge | data | metrics | view | report | plan | profile | ..."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from dapo import __version__
from dapo.config import Config
from dapo.errors import DISK_FAULTS, ConfigError, DapoError, ModelError, StorageError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dapo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models from verifiable rewards with DAPO."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/guess_five.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example optim.lr=1e-5.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue this run from its newest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan, and exit.")
    ] = False,
) -> None:
    """Train a model as a recipe says.

    The same recipe again starts another run, NAME-2, unless run.name=NAME is given. --resume continues a run with its
    own options; of the recipe only run.dir and run.name are used then.
    """
    config = Config.load(recipe, overrides or ())
    console = Console()
    if dry_run:
        from dapo.plan import plan_text

        typer.echo(config.to_yaml())
        typer.echo(plan_text(config))
        return
    _check_cluster(config)
    # torch and transformers take seconds to import, so only commands that need them import them.
    with console.status("starting"):
        from dapo.training.command import resume_training, start_training
    run = resume_training if resume else start_training
    _exit_on_signal(run(console, config, overrides or (), recipe.stem))


@app.command("resume")
def resume_run(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example run.steps=200.")] = None,
) -> None:
    """Continue a run from its newest checkpoint, with its own options except those that are given."""
    from dapo.store.configuration import recorded_config

    folder = run.resolve() if run.name in ("", "..") else run
    config = recorded_config(folder, overrides or ()).renamed(folder.name, str(folder.parent))
    _check_cluster(config)
    console = Console()
    with console.status("starting"):
        from dapo.training.command import resume_training
    _exit_on_signal(resume_training(console, config, overrides or ()))


def _exit_on_signal(number: int | None) -> None:
    if number is not None:
        raise typer.Exit(128 + number)


@app.command()
def metrics(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per step and line.")] = False,
) -> None:
    """Print the metrics of every step of a run, its evaluations and its newest events."""
    from dapo.terminal.history import json_lines, print_history

    if as_json:
        for line in json_lines(run):
            sys.stdout.write(line + "\n")
    else:
        print_history(Console(), run)


@app.command()
def view(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, or one run directory.")] = Path("runs"),
    host: Annotated[str, typer.Option("--host", help="Address to listen on; other machines need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8080,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="DAPO_VIEW_TOKEN", help="Required of visitors; default: random."),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Show runs in the browser, also while they train: curves, groups, tokens, prompts, warnings."""
    try:
        from dapo.view.page.server import address, serve
    except ModuleNotFoundError as error:
        if error.name != "nicegui":
            raise
        raise ConfigError("the page needs NiceGUI: pip install nicegui") from None
    where = address(host, port, token)
    serve(
        runs,
        where,
        opens=not no_open,
        find_model=_model_folder,
        ready=lambda: typer.echo(f"{runs} is shown at {where.url} (Ctrl-C to stop)"),
    )


@cache
def _model_folder(path: str) -> Path | None:
    """Return the local folder of a run's model; None if it is gone or damaged."""
    from dapo.model.gguf import find_local

    try:
        return find_local(path)
    except ModelError:
        return None


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; default: RUN-report.html here.")] = None,
) -> None:
    """Write a run as one HTML file that needs no server: curves, evaluations, groups, events and options."""
    from dapo.view.report import write_report

    file = out or Path(f"{run.resolve().name}-report.html")
    write_report(run, file)
    typer.echo(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")


@app.command("eval")
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Runs (RUN, RUN@STEP, RUN@best, RUN@last) or models, then KEY=VALUE options.")
    ],
    data: Annotated[str | None, typer.Option("--data", help="Questions: a file, a hub id, or as eval.data.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Samples per question.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="aime: 32 samples, temperature 1, top_p 0.7.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write all metrics to this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where samples go; default: runs/eval-SET-TIME.")] = None,
) -> None:
    """Evaluate runs or models: avg@k, pass@k, maj@k with 95 % intervals, and the differences from the first one."""
    if as_json is not None and not as_json.parent.is_dir():
        raise ConfigError(f"--json {as_json}: there is no folder {as_json.parent}")
    console = Console()
    with console.status("starting"):
        from dapo.evaluation.compare import comparison_json, evaluate_models, print_comparison
        from dapo.evaluation.subjects import split_arguments
        from dapo.system.files import write_text
    named, overrides = split_arguments(models)
    found = evaluate_models(named, overrides, data=data, k=k, preset=preset, out=out, console=console)
    print_comparison(console, found)
    if as_json is not None:
        write_text(as_json, comparison_json(found))


@app.command()
def judge(
    response: Annotated[str, typer.Argument(help="A response; or a .jsonl file of rows with a column `completion`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Options to change, for example reward.timeout=60.")
    ] = None,
    use: Annotated[str, typer.Option("--use", help="The judge, as reward.use.")] = "auto",
    answer: Annotated[str | None, typer.Option("--answer", help="The gold answer, where a row has none.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The question, for judges that read it.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Count tokens as this model does.")] = None,
) -> None:
    """Judge a response, or a file of responses, without a run: score, verdict, extracted answer and reason."""
    from dapo.evaluation import judging

    options = judging.reward_options({}, [f"reward.use={use}", *(overrides or ())])
    is_file = response.endswith((".jsonl", ".parquet"))
    if is_file:
        places, responses = judging.read_responses(response, answer)
    else:
        places, responses = [""], [judging.response_to(response, prompt, answer)]
        options = options.model_copy(update={"workers": 1})
    if model is not None:
        from dapo.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model)
        responses = [r._replace(tokens=r.tokens or tokenizer(r.text)["input_ids"]) for r in responses]
    judgments = []
    for where, given, found in zip(places, responses, judging.judge_all(responses, options), strict=True):
        judgments.append(found)
        shown = judging.describe(found, given.prompt.answer)
        if is_file:
            typer.echo(f"{where}: " + ", ".join(f"{name} {text}" for name, text in shown.items()))
        else:
            typer.echo("\n".join(f"{name + ':':<12}{text}" for name, text in shown.items()))
    if is_file:
        typer.echo(judging.summary(judgments))


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/dapo_qwen2.5_32b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example rollout.n=8.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Number of GPUs, or several: 8,128,1024; default: as in cluster."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, h800, h20, b200, a100, l40s, rtx4090, ...")] = "h200",
    rollout_share: Annotated[
        float | None,
        typer.Option(
            "--rollout-share", help="Share of GPUs that only sample; 0: all take turns; default: as in cluster."
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
        float | None, typer.Option("--judge-seconds", help="Seconds per response and worker; default: 0.0008, as math.")
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


@app.command()
def profile(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/guess_five.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example optim.lr=1e-5.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to profile, after two to warm up.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="The folder that the Chrome traces go to.")] = Path("profile"),
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


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    to: Annotated[Path, typer.Option("--to", help="Where to write the Hugging Face directory.")],
    which: Annotated[
        str | None, typer.Option("--which", help="best, last or a step; default: the best if one is marked.")
    ] = None,
    adapters: Annotated[bool, typer.Option("--adapters", help="Write the LoRA adapters alone, not merged.")] = False,
) -> None:
    """Write a checkpoint's model with a model card as a plain Hugging Face directory."""
    with Console().status("exporting"):
        from dapo.checkpoint.export import export_run

        saved = export_run(run, to, which, adapters=adapters)
    Console().print(f"{saved} exported to {to}")


data_app = typer.Typer(no_args_is_help=True, help="Check a dataset, or write a well-known one.")
app.add_typer(data_app, name="data")


@data_app.command()
def check(
    path: Annotated[str, typer.Argument(help="A JSONL or parquet file, a glob, or a hub id.")],
    reward: Annotated[str, typer.Option("--reward", help="The rule that has to read the gold answers.")] = "math",
    template: Annotated[str | None, typer.Option("--template", help="As data.prompt_template.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Count tokens as this model does, not words.")] = None,
) -> None:
    """Count rows, repeats, bad rows and lengths, and gold answers that the reward can read. Exit code 1: bad rows."""
    from dapo.config import RewardConfig
    from dapo.data.check import check_dataset, print_report
    from dapo.rewards.rules import can_read_gold

    options = RewardConfig()
    can_read_gold(reward, "0", options)  # raises for an unknown rule before a large file is read
    tokenizer = None
    if model is not None:
        with Console().status("reading the tokenizer"):
            from dapo.model.loading import load_tokenizer

            tokenizer = load_tokenizer(model)
    report = check_dataset(path, lambda answer: can_read_gold(reward, answer, options), template, tokenizer)
    print_report(Console(), report)
    raise typer.Exit(0 if report.is_good else 1)


@data_app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="dapo-math-17k, aime-2024, gsm8k or math.")],
    source: Annotated[str | None, typer.Option("--from", help="A local file instead of the hub.")] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder that the parquet file is written to.")] = Path("data"),
) -> None:
    """Fetch a dataset, or read a file, and write it as the recipes expect it: each question once, with its answer."""
    from dapo.data.prepare import prepare as prepare_dataset

    for sentence in prepare_dataset(name, source, to).sentences():
        Console().print(sentence, markup=False, highlight=False)


@app.command()
def doctor() -> None:
    """Check what this machine has and what is missing."""
    from dapo.doctor import check, is_usable, print_table

    findings = check()
    print_table(Console(), findings)
    raise typer.Exit(0 if is_usable(findings) else 1)


def _check_cluster(config: Config) -> None:
    """Raise what is wrong with the run directory or the cluster's resources, before seconds are spent on imports."""
    from dapo.cluster.ray_connection import check_room, check_run_dir, needs_ray

    check_run_dir(config)
    if needs_ray(config):
        check_room(config)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what the user can fix into one sentence on standard error and an exit code, without a traceback."""
    try:
        yield
    except DapoError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        # No permission, no space, a file instead of a folder: the user can fix it if the error names the file.
        if error.filename is None and error.errno not in DISK_FAULTS:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        is_disk = error.errno in DISK_FAULTS
        _fail(f"{where}{error.strerror}", StorageError.exit_code if is_disk else DapoError.exit_code)
    except MemoryError:
        _fail("this machine has too little memory; lower the batch sizes or lengths, or use a smaller model", 3)
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """Run the command line."""
    with sentences():
        app()


_MAX_SHOWN = 1000


def _fail(sentence: str, exit_code: int) -> NoReturn:
    # File names can contain newlines, escape sequences, and bytes that are not text.
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in sentence)
    if len(shown) > 2 * _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]} ... {shown[-_MAX_SHOWN:]}"
    Console(stderr=True, soft_wrap=True).print(f"error: {shown}", style="red", markup=False, highlight=False)
    sys.exit(exit_code)
