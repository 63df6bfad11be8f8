"""Read the records of an ablation's runs: the status of each, its evaluations, and a summary of its training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dapo.ablation.plan import Plan
from dapo.errors import DapoError
from dapo.evaluation.evaluate import metrics_by_problem
from dapo.store.configuration import DATABASE_FILE
from dapo.store.database import RunDatabase
from dapo.store.reading import RunReader
from dapo.terminal.evaltable import headline
from dapo.types import EventKind

_TAIL = 0.1  # share of the steps that count as the end of training


class Status(StrEnum):
    FINISHED = "finished"
    ENDED_EARLY = "ended early"  # nothing was left to learn; its last evaluation stands for the rest of the budget
    FAILED = "failed"
    UNFINISHED = "unfinished"
    MISSING = "not started"

    @property
    def is_done(self) -> bool:
        return self in (Status.FINISHED, Status.ENDED_EARLY)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """One evaluation: the main metric of each question, and how much the run had trained by then."""

    step: int
    seconds: float
    tokens: float
    values: Mapping[str, float]
    unjudged: float = 0.0  # share of its responses

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values()))) if self.values else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Totals, shares and maxima over all steps; entropy and length over the last tenth of the steps that have them."""

    steps: float  # a mean over seeds may not be whole
    seconds: float
    tokens: float
    entropy: float
    length: float
    dropped: float  # share of the generated tokens that were in dropped or stale groups
    cut_off: float  # share of the responses
    longest: float  # tokens
    clipped: float  # largest share of a step's tokens that were clipped from above
    flat_groups: float  # groups dropped because all responses were right, all wrong, or all scored alike


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    name: str
    arm: str
    seed: int
    status: Status
    reason: str | None  # why it failed or ended early
    metric: Mapping[str, str]  # evaluation set -> name of its main metric
    evaluations: Mapping[str, Sequence[Evaluation]]
    training: Training | None
    curves: Mapping[str, np.ndarray]  # per step: step, entropy and response_length/mean


def read_status(folder: Path) -> Status:
    """Return the status of a run from its database. A finished run has finished and evaluated its last step.

    A run whose database cannot be read has failed: the other runs can still be trained and compared.
    """
    try:
        if not RunDatabase.exists(folder / DATABASE_FILE):
            return Status.MISSING
        with RunDatabase.open_readonly(folder / DATABASE_FILE) as database:
            return _status(database)[0]
    except DapoError:
        return Status.FAILED


def read_runs(plan: Plan, failures: Mapping[str, str], known: Sequence[RunRecord] = ()) -> list[RunRecord]:
    """Read all runs, but not again those that are done in `known`.

    `failures` has this session's failures, including runs that failed before they had a database.
    """
    done = {run.name: run for run in known if run.status.is_done}
    return [
        done.get(run.config.run.name) or _read_run(run.folder, run.arm, run.seed, failures.get(run.config.run.name))
        for run in plan.runs
    ]


def _read_run(folder: Path, arm: str, seed: int, failure: str | None) -> RunRecord:
    def without_records(status: Status, reason: str | None) -> RunRecord:
        return RunRecord(folder.name, arm, seed, status, reason, {}, {}, None, {})

    try:
        if not RunDatabase.exists(folder / DATABASE_FILE):
            return without_records(Status.FAILED if failure else Status.MISSING, failure)
        with RunDatabase.open_readonly(folder / DATABASE_FILE) as database:
            status, message = _status(database)
            steps = list(database.steps())
            metric, evaluations = _evaluations(database, steps)
            training = _training(steps) if steps else None
            curves = {name: _column(steps, name) for name in ("step", "entropy", "response_length/mean")}
            return RunRecord(folder.name, arm, seed, status, failure or message, metric, evaluations, training, curves)
    except DapoError as error:  # a damaged database may be found out only when that page is read
        return without_records(Status.FAILED, failure or str(error))


def _status(database: RunReader) -> tuple[Status, str | None]:
    (last,) = [None, *database.endings()][-1:]
    if last is not None and last["kind"] == EventKind.STOPPED:
        return Status.FAILED, last["message"]
    step = database.last_step()
    if last is not None and last["kind"] == EventKind.FINISHED and last["step"] == step:
        reason = early_end(database, step)
        return (Status.FINISHED if reason is None else Status.ENDED_EARLY), reason
    return Status.UNFINISHED, None


def early_end(database: RunReader, step: int) -> str | None:
    """Return why nothing was left to learn after `step`, or None if training did not end for that reason.

    Such a run records why it stops, and at once that it is interrupted, because it is still to be evaluated. After a
    failure the process records nothing more.
    """
    events = [event for event in database.endings() if event["step"] == step]
    for event, following in pairwise(events):
        if event["kind"] == EventKind.STOPPED and following["kind"] in (EventKind.FINISHED, EventKind.INTERRUPTED):
            return event["message"]
    return None


def _evaluations(
    database: RunReader, steps: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, str], dict[str, list[Evaluation]]]:
    spent = {name: np.cumsum([0.0, *(step.get(name, 0.0) for step in steps)]) for name in _AXES}
    numbers = [0, *(step["step"] for step in steps)]
    rows = list(database.evals())
    metrics = _main_metrics(rows)
    found: dict[str, list[Evaluation]] = {}
    for step in sorted({row["step"] for row in rows} & set(numbers)):
        place = numbers.index(step)
        for report in database.eval_reports(step):
            k = max(Counter(sample.prompt.uid for sample in report.samples).values())
            values = metrics_by_problem(report.samples, k).get(metrics[report.name], {})
            seconds, tokens = (float(spent[name][place]) for name in _AXES)
            unjudged = float(np.mean([not sample.score.judged for sample in report.samples]))
            found.setdefault(report.name, []).append(Evaluation(step, seconds, tokens, values, unjudged))
    return metrics, found


_AXES = ("timing_s/step", "tokens/generated")


def _main_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the main metric of each set: the one that all its evaluations have, apart from wholly unjudged ones."""
    found: dict[str, set[str]] = {}
    for row in rows:
        members = found.setdefault(row["name"], set())
        if not math.isnan(row["metrics"].get("reward/mean", math.nan)):
            members.add(headline(row["metrics"])[0])
    return {name: members.pop() if len(members) == 1 else "reward/mean" for name, members in found.items()}


def _training(steps: Sequence[Mapping[str, Any]]) -> Training:
    def total(*prefixes: str) -> float:
        return float(sum(value for step in steps for name, value in step.items() if name.startswith(prefixes)))

    def at_end(name: str) -> float:
        """Average the last tenth of the steps that have a value; one that samples nothing has no response length."""
        values = _column(steps, name)
        known = values[~np.isnan(values)]
        return float(known[-max(1, round(_TAIL * len(known))) :].mean()) if len(known) else math.nan

    generated = _column(steps, "tokens/generated")
    groups = _column(steps, "groups/generated")
    has_groups = groups > 0
    flat = ("groups/dropped/all_right", "groups/dropped/all_wrong", "groups/dropped/no_variance")
    cut_off = np.nan_to_num(_column(steps, "response_length/clip_ratio"))[has_groups]
    return Training(
        steps=len(steps),
        seconds=float(np.nansum(_column(steps, "timing_s/step"))),
        tokens=float(np.nansum(generated)),
        entropy=at_end("entropy"),
        length=at_end("response_length/mean"),
        dropped=total("tokens/dropped/", "tokens/stale") / max(float(np.nansum(generated)), 1.0),
        cut_off=float(np.average(cut_off, weights=groups[has_groups])) if has_groups.any() else 0.0,
        longest=_largest(_column(steps, "response_length/max")),
        clipped=_largest(_column(steps, "clip_fraction/high")),
        flat_groups=total(*flat),
    )


def _column(steps: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([step.get(name, np.nan) for step in steps], dtype=np.float64)


def _largest(values: np.ndarray) -> float:
    return float(np.nan_to_num(values).max(initial=0.0))
