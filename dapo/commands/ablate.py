"""`dapo ablate`: train the arms of a recipe with several seeds, and compare them."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dapo.errors import ClusterError, ConfigError, DapoError, NotReady, TrainingStopped, one_line

if TYPE_CHECKING:
    from dapo.ablation.plan import Budget, Plan, PlannedRun
    from dapo.ablation.records import RunRecord, Status
    from dapo.ablation.results import Result
    from dapo.ablation.side_by_side import Site
    from dapo.config import Config


def ablate(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/arithmetic.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Options to change in all arms; an arm's own options win.")
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option("--arms", help="ladder, leave-one-out, or a YAML file of arms; can be repeated. Default: ladder."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="'NAME: KEY=VALUE ...', or one arm of ladder or leave-one-out.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Runs per arm, from run.seed on.")] = 3,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps per run; default: the recipe's.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.001, help="Training seconds per run.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Generated tokens per run.")] = None,
    reach: Annotated[
        list[float] | None,
        typer.Option(
            "--reach",
            help="Also show when each arm reached this accuracy in % (or mean reward, if answers have no accuracy); "
            "can be repeated.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of all runs; default: ablations/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue; arms and seeds may be added.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Train runs side by side on this Ray cluster: HOST:PORT, auto, or local."
        ),
    ] = None,
    runs_per_gpu: Annotated[
        int, typer.Option("--runs-per-gpu", min=1, max=64, help="With --ray: runs that share a GPU and its memory.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all arms, show them, and exit.")] = False,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the last checkpoint of every run, not only its records.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no steps, only the runs and the result.")] = False,
) -> None:
    """Find out which techniques help on your task: train arms of a recipe with several seeds, and compare them.

    The ladder starts from plain GRPO and adds overlong filtering, clip-higher, soft overlong punishment, token-level
    loss and dynamic sampling, as the paper's table does. leave-one-out compares all five with all but one. Each run is
    an ordinary run directory in OUT/runs. The result is printed and written to OUT/ablation.html and OUT/ablation.json.
    """
    from dapo.ablation.plan import make_plan

    for option, numbers in (("--seconds", [seconds or 0.0]), ("--reach", reach or ())):
        if wrong := [number for number in numbers if not math.isfinite(number)]:
            raise ConfigError(f"{option} is {wrong[0]}; expected a finite number")
    if runs_per_gpu > 1 and ray is None:
        raise ConfigError("--runs-per-gpu: runs are trained at once only with --ray; add --ray local")
    plan_in = partial(
        make_plan,
        recipe,
        overrides or (),
        families=arms or (),
        arms=arm or (),
        seeds=seeds,
        budget=_budget(steps, seconds, tokens),
    )
    plan = plan_in(out=out or Path("ablations") / recipe.stem)
    obstacle = plan.obstacle() if dry_run and not resume else None
    if obstacle:  # check the arms as in a new folder, and leave alone what may be training in this one
        plan = plan_in(out=_free_name(plan.out))
    plan.check_folder(resume=resume)
    console, levels = Console(), sorted(set(reach or ()))
    for sentence in _check_levels(plan, levels):
        _warn(console, sentence)
    _say(f"checking {len(plan.arms)} arms of {recipe}")
    _check_and_show(plan, console, resume=resume, on_ray=ray is not None, fetches=not dry_run and ray is None)
    if obstacle:
        _warn(console, obstacle)
    if not dry_run:
        with ExitStack() as undo:
            site = _join(undo, plan, ray, runs_per_gpu, console) if ray is not None else None
            _run(plan, console, site, levels, keep_checkpoints=keep_checkpoints, quiet=quiet)


def _free_name(folder: Path) -> Path:
    folder = folder.absolute()  # "." has no name
    return next(path for number in count(2) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())


def _check_and_show(plan: Plan, console: Console, *, resume: bool, on_ray: bool, fetches: bool) -> None:
    from dapo.ablation.tables import plan_table
    from dapo.ablation.warnings import warnings

    with console.status("checking all arms"):
        doubtful = _check_arms(plan, resume=resume, on_ray=on_ray)
    if fetches and _fetch_models(plan, resume=resume):
        doubtful = _check_arms(plan, resume=resume, on_ray=on_ray)  # now also the fetched models' context and template
    console.print(plan_table(plan))
    for sentence in (*doubtful, *warnings(plan)):
        _warn(console, sentence)


def _warn(console: Console, sentence: str) -> None:
    console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _say(line: str, style: str = "dim") -> None:
    from dapo.terminal.output import log_console

    log_console().print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _budget(steps: int | None, seconds: float | None, tokens: int | None) -> Budget | None:
    from dapo.ablation.plan import Budget

    given = [Budget("steps", steps)] if steps is not None else []
    given += [Budget("seconds", seconds)] if seconds is not None else []
    given += [Budget("tokens", tokens)] if tokens is not None else []
    if len(given) > 1:
        raise ConfigError("--steps, --seconds and --tokens: give only one, the same budget for every run")
    return given[0] if given else None


def _check_levels(plan: Plan, levels: list[float]) -> list[str]:
    """Refuse levels that no accuracy can have. Return warnings instead if they may be mean rewards."""
    from dapo.rewards.judge import judge_specs
    from dapo.rewards.rules import RULES

    def has_accuracy(config: Config) -> bool:
        """Return whether the judge is known to give one; a function, a model or an environment may score without it."""
        is_rule = not {"auto", *RULES}.isdisjoint(judge_specs(config.reward))
        return is_rule and config.environment.use in (None, "python")

    wrong = [level for level in levels if not 0 < level <= 100]
    if wrong and all(has_accuracy(run.config) for run in plan.runs):
        raise ConfigError(f"--reach is {wrong[0]:g}; expected an accuracy in %, above 0 and at most 100")
    return [
        f"--reach {level:g} has a meaning only as a mean reward: accuracies are above 0 and at most 100%"
        for level in wrong
    ]


def _check_arms(plan: Plan, *, resume: bool, on_ray: bool) -> list[str]:
    """Check every arm as `dapo train --dry-run` does; raise with one sentence for each problem and its arms.

    Return one sentence for each warning of these checks and its arms.
    """
    from dapo.ablation.plan import by_arms
    from dapo.ablation.records import Status
    from dapo.cluster import torchrun
    from dapo.commands.preflight import Findings, check_run

    if torchrun.channel() is not None:
        raise ConfigError("dapo ablate starts the process of each run itself; start it without torchrun")
    problems: dict[str, list[str]] = {}
    doubts: dict[str, list[str]] = {}
    # Reading data can take minutes, and most arms have the same: what is wrong with it, by the options that decide.
    checked: list[tuple[Any, Findings]] = []
    statuses, first = _left(plan, resume=resume)

    def check(run: PlannedRun, *, reads_data: bool) -> Findings:
        if on_ray and (refusal := _unplaceable(run.config)):
            return Findings(missing=[refusal])
        is_begun = statuses.get(run.config.run.name, Status.MISSING) != Status.MISSING
        return check_run(run.config, resume=is_begun, has_given_name=True, reads_data=reads_data)

    for reads_data in (False, True):  # what is quick to find in any arm is said first
        for arm, run in first.items():
            data = (reads_data, _data_options(run.config) if reads_data else arm)
            if data not in [options for options, _ in checked]:
                checked.append((data, check(run, reads_data=reads_data)))
            found = next(found for options, found in checked if options == data)
            for sentences, by_sentence in ((found.missing, problems), (found.warnings, doubts)):
                for sentence in sentences:
                    if arm not in (arms := by_sentence.setdefault(sentence, [])):
                        arms.append(arm)
        if problems:
            raise NotReady(by_arms(problems, len(first)))
    return by_arms(doubts, len(first))


def _left(plan: Plan, *, resume: bool) -> tuple[dict[str, Status], dict[str, PlannedRun]]:
    """Return the status of each run by its name, and the first run of each arm that is left to train.

    A run that failed before is tried again, but is not among these: its problem must not stop the others.
    """
    from dapo.ablation.records import Status, read_status

    statuses = {run.config.run.name: read_status(run.folder) for run in plan.runs} if resume else {}
    first: dict[str, PlannedRun] = {}
    for run in plan.runs:
        status = statuses.get(run.config.run.name, Status.MISSING)
        if not status.is_done and status != Status.FAILED:
            first.setdefault(run.arm, run)
    return statuses, first


def _fetch_models(plan: Plan, *, resume: bool) -> bool:
    """Fetch the models that are not on this machine, so that a wrong name is found before the first arm is trained.

    Return whether there were any. Raise with one sentence for each that cannot be fetched.
    """
    from dapo.ablation.plan import by_arms
    from dapo.model.loading import find_path, resolve_path

    _, first = _left(plan, resume=resume)
    missing: dict[str, list[str]] = {}
    for arm, run in first.items():
        if find_path(run.config.model.path) is None:
            missing.setdefault(run.config.model.path, []).append(arm)
    problems: dict[str, list[str]] = {}
    for path, arms in missing.items():
        try:
            resolve_path(path)
        except DapoError as error:
            problems[str(error)] = arms
    if problems:
        raise NotReady(by_arms(problems, len(first)))
    return bool(missing)


def _unplaceable(config: Config) -> str | None:
    """Say why Ray cannot place the run as a whole, if so."""
    from dapo.cluster.placement import wants_gpus
    from dapo.cluster.ray_connection import needs_ray

    if needs_ray(config):
        return (
            "cluster.learners, cluster.rollout_workers and cluster.reward_workers place parts of a run on Ray, but "
            "--ray places whole runs; leave out --ray, or these options"
        )
    try:
        wants_gpus(config, available=0)
    except ClusterError as error:
        return str(error)
    return None


def _data_options(config: Config) -> Any:
    """Return the options that decide how the data is read."""
    data = config.data.model_copy(update={"train_batch_size": 1, "gen_batch_size": 0})
    reward = config.reward.use, config.reward.think_tags
    return data, config.eval.data, config.model, config.environment, reward, config.run.seed


def _join(undo: ExitStack, plan: Plan, address: str, runs_per_gpu: int, console: Console) -> Site:
    """Join the cluster, and find the room on it; leave it when `undo` is closed."""
    from dapo.cluster.placement import alive_nodes
    from dapo.cluster.ray_connection import join

    has_joined = join(address)
    import ray

    from dapo.ablation.side_by_side import Site

    if has_joined:
        undo.callback(ray.shutdown)
    site = Site.of(plan, alive_nodes(), runs_per_gpu)
    if site.shared:
        instead = "; give --steps or --tokens instead" if plan.budget.unit == "seconds" else ""
        _warn(console, f"runs on the same {site.shared} slow each other, so their seconds cannot be compared{instead}")
    return site


def _run(
    plan: Plan, console: Console, site: Site | None, levels: list[float], *, keep_checkpoints: bool, quiet: bool
) -> None:
    from dapo.ablation.records import read_runs, read_status
    from dapo.ablation.report import write_report
    from dapo.ablation.results import compare
    from dapo.ablation.session import Session, train_in_turn
    from dapo.ablation.tables import print_result, result_json, unfinished
    from dapo.system.files import write_text

    plan.write()
    if done := [run.config.run.name for run in plan.runs if read_status(run.folder).is_done]:
        _say(
            f"{len(done)} of {len(plan.runs)} runs {'is' if len(done) == 1 else 'are'} done already: {', '.join(done)}"
        )

    def on_run(number: int, run: PlannedRun, what: str, style: str) -> None:
        _say(f"run {number} of {len(plan.runs)}: {run.config.run.name} {what}", style)

    records: list[RunRecord] = []

    def write() -> tuple[Result, str]:
        """Write the result of the runs that are done. Return it, and a line about the report."""
        records[:] = read_runs(plan, session.failures, records)
        result = compare(plan, records, levels)
        write_text(plan.out / "ablation.json", result_json(result))
        return result, write_report(result, plan.out / "ablation.html")

    def write_so_far() -> None:
        try:
            write()
        except Exception as error:  # must not stop the runs; at the end it is written again
            _say(f"the result so far could not be written: {one_line(error)}", "yellow")

    session = Session(plan, keep_checkpoints, "quiet" if quiet else "normal", on_run, write_so_far)
    if site is None:
        train_in_turn(session)
    elif len(done) < len(plan.runs):
        from dapo.ablation.side_by_side import SideBySide

        _say(site.sentence(len(plan.runs) - len(done)))
        SideBySide(session, site, say=lambda line: _say(line, "yellow")).train()
    result, report = write()
    print_result(console, result)
    for line in unfinished(result.runs):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(report, markup=False, highlight=False, soft_wrap=True)
    console.print(f"dapo view {plan.out} shows the result and every run in the browser", markup=False, soft_wrap=True)
    if session.signal is not None:
        console.print("to continue: the same command with --resume", soft_wrap=True)
        raise typer.Exit(128 + session.signal)
    if session.failures:
        name, failure = next(iter(session.failures.items()))
        raise TrainingStopped(
            f"{len(session.failures)} of {len(plan.runs)} runs failed, first {name} ({failure}); the result is that of "
            "the others, and --resume tries them again"
        )
