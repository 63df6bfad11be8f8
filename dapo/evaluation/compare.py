"""`dapo eval`: evaluate several models on the same questions with the same random numbers, and compare them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dapo.cluster.assemble import check_samplers
from dapo.cluster.ray_connection import check_run_dir
from dapo.config import TOOLS, Config
from dapo.data.dataset import load_eval_sets
from dapo.data.stream import any_answers
from dapo.environments.pool import build_environment
from dapo.environments.protocol import EnvironmentPool
from dapo.errors import RewardError
from dapo.evaluation.evaluate import differences, evaluate, sampling_params
from dapo.evaluation.parts import SharedParts
from dapo.evaluation.subjects import Subject, differing_settings, resolve
from dapo.model.loading import load_tokenizer, resolve_path
from dapo.rewards.judge import check_columns, columns_seen, judge_kinds
from dapo.sampling.episodes import Environment
from dapo.store.configuration import CONFIG_FILE, DATABASE_FILE
from dapo.store.database import RunDatabase, versions
from dapo.system.files import write_text
from dapo.terminal.evaltable import DifferenceRow, EvalRow, differences_table, models_table, summary
from dapo.terminal.output import json_text, print_table
from dapo.types import EvalReport


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    subject: Subject
    report: EvalReport
    seconds: float  # spent on sampling and judging


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The results of all models and their differences from the first model, by evaluation set."""

    folder: Path
    notes: tuple[str, ...]
    results: dict[str, list[Result]]
    differences: dict[str, list[DifferenceRow]]


def evaluate_models(
    models: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    k: int | None = None,
    preset: str | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> Comparison:
    """Evaluate one model after the other, one in memory at a time, and compare each with the first."""
    console = console or Console(quiet=True)
    subjects = resolve(models, overrides, data=data, k=k, preset=preset, out=out)
    for subject in subjects:  # report what is missing before hours are spent on the models before it
        resolve_path(subject.config.model.path)
        check_samplers(subject.config)
    check_run_dir(subjects[0].config, "--out")
    results: dict[str, list[Result]] = {}
    with closing(SharedParts(on_event=lambda kind, message: _print(console, f"{kind}: {message}", "dim"))) as parts:
        for subject in subjects:
            for result in _evaluate(subject, parts, console):
                results.setdefault(result.report.name, []).append(result)
    found = {name: _differences(members) for name, members in results.items()}
    return Comparison(Path(subjects[0].config.run.dir), differing_settings(subjects), results, found)


def print_comparison(console: Console, comparison: Comparison) -> None:
    for name, results in comparison.results.items():
        problems, k = int(results[0].report.metrics["problems"]), results[0].subject.config.eval.k
        rows = [EvalRow(result.subject.label, result.report.metrics, result.seconds) for result in results]
        title = f"{name}: {problems} question{'s' * (problems != 1)} x {k} sample{'s' * (k != 1)}"
        print_table(console, models_table(title, rows, console.width))
        if len(results) > 1:
            print_table(console, differences_table(results[0].subject.label, comparison.differences[name]))
    first = next(iter(comparison.results.values()))[0].subject.config
    settings = f"judged by {_judge(first)}, at most {first.data.max_response_length:,} tokens per response"
    _print(console, settings)
    for note in comparison.notes:
        _print(console, f"note: {note}", "yellow")
    folder = comparison.folder
    _print(console, f"every sample is in {folder}; dapo view {folder} shows them")


def _judge(config: Config) -> str:
    """Return what scores the responses; an environment of the user may leave some episodes to `reward.use`."""
    use = config.environment.use
    if use is None or use == "python" or use.startswith(TOOLS):
        return str(config.reward.use)
    return use if use == "guess" else f"{use}, or {config.reward.use} where it gives no score"


def comparison_json(comparison: Comparison) -> str:
    """Return everything but the samples as JSON."""
    sets = {}
    for name, results in comparison.results.items():
        models = [
            {
                "model": result.subject.label,
                "path": result.subject.config.model.path,
                "step": result.subject.step,
                "folder": str(result.subject.config.run_dir),
                "seconds": result.seconds,
                "metrics": result.report.metrics,
            }
            for result in results
        ]
        differences = [{**asdict(row), "verdict": row.verdict} for row in comparison.differences[name]]
        sets[name] = {"models": models, "differences": differences}
    first = next(iter(comparison.results.values()))[0].subject.config
    asked = {
        **first.eval.model_dump(mode="json", exclude={"every", "best_metric"}),
        "reward": first.reward.use,
        "prompt_template": first.data.prompt_template,
        "max_response_length": first.data.max_response_length,
        "seed": first.run.seed,
    }
    document = {"eval": asked, "folder": str(comparison.folder), "notes": comparison.notes, "sets": sets}
    return json_text(document)


def _evaluate(subject: Subject, parts: SharedParts, console: Console) -> list[Result]:
    with ExitStack() as opened:
        environments = build_environment(subject.config)
        if environments is not None:
            opened.callback(environments.close)
        return _evaluate_in(environments, subject, parts, console)


def _evaluate_in(
    environments: EnvironmentPool | None, subject: Subject, parts: SharedParts, console: Console
) -> list[Result]:
    config, notes = subject.config, list[str]()
    # Before the weights, so that errors in the data or the reward's signature show at once.
    kinds, tokenizer = judge_kinds(config.reward, None), load_tokenizer(config.model.path)
    sets = load_eval_sets(config, tokenizer, notes, columns_seen(kinds), None, environments)
    environment = Environment.of(config, environments, tokenizer)
    asked = [prompt for prompts in sets.values() for prompt in prompts]
    has_answers = environments is not None or any_answers(asked)
    check_columns(kinds, {"data_source"}.union(*(prompt.extra for prompt in asked)), has_answers=has_answers)
    for note in notes:
        _print(console, note, "dim")
    engine, judge = parts.open(config)
    k, params, tags = config.eval.k, sampling_params(config), config.reward.think_tags
    results = []
    with closing(_database(config)) as database:
        for name, prompts in sets.items():
            start = time.perf_counter()
            with _progress(console, f"{subject.label}, {name}") as on_sample:
                # Step 0 for every model: the same question gets the same random numbers, which pairs the models.
                report = evaluate(engine, judge, prompts, k, params, 0, name, on_sample, tags, environment)
            report = replace(report, step=subject.step)
            database.record_eval(report)
            _check_judged(subject.label, report)
            _print(console, f"{subject.label}, {name}: {summary(report.metrics)}")
            results.append(Result(subject, report, time.perf_counter() - start))
    return results


def _database(config: Config) -> RunDatabase:
    """Create a run directory for the samples, so that every command that reads runs can read it."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    resolved = config.to_yaml()
    write_text(config.run_dir / CONFIG_FILE, resolved)
    return RunDatabase.create(config.run_dir / DATABASE_FILE, resolved, versions())


def _print(console: Console, text: str, style: str | None = None) -> None:
    # Wrap in a terminal only; in a file or a pipe every line stays whole.
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


@contextmanager
def _progress(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    columns = [
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("samples"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    ]
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # Short samples finish first, so estimate the speed from the whole evaluation so far.
        speed_estimate_period=3600,
    )
    with bar:
        task = bar.add_task(escape(description), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _check_judged(label: str, report: EvalReport) -> None:
    if report.samples and not any(sample.score.judged for sample in report.samples):
        raise RewardError(
            f"{label}: none of its {len(report.samples)} responses to {report.name} could be judged; the first reason: "
            f"{report.samples[0].score.error}"
        )


def _differences(results: Sequence[Result]) -> list[DifferenceRow]:
    first, *others = results
    return [row for other in others for row in differences(first.report, other.report, other.subject.label)]
