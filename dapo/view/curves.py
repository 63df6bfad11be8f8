"""Metrics over the steps of a run, thinned to few enough points to draw."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dapo.store.encoding import metrics_from_json, to_json
from dapo.view.source import Run, configuration

MAX_POINTS = 1_000
MAX_BANDS = 100
LEVELS = (0.1, 0.9)  # quantiles of a band
# Larger than any real run. Rows beyond these limits, in a damaged or hostile file, are not read into memory.
_MOST_STEPS = 1_000_000
_MOST_NAMES = 10_000
_MOST_EVALUATIONS = 20_000

TOKENS_IN = ("carried_in", "generated")
# Besides these there is dropped/REASON.
_TOKENS = (*TOKENS_IN, "trained", "masked", "stale", "carried_out")

# A skip scan: each next name is one lookup in the primary key (name, step), so the number of rows does not matter.
_NAMES = """
WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM metrics
    UNION ALL SELECT (SELECT min(name) FROM metrics WHERE name > names.name) FROM names WHERE name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL LIMIT ?
"""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One metric. NaN marks a step in which it was not a number, and with gaps one that did not record it."""

    name: str
    steps: np.ndarray  # int64 [points]
    values: np.ndarray  # float64 [points]


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Quantiles of a per-response value in each of the given steps."""

    steps: np.ndarray  # int64 [points]
    quantiles: np.ndarray  # float64 [levels, points]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of a total over steps. Each point is the mean over the steps since the previous point."""

    steps: np.ndarray  # int64 [points]
    parts: Mapping[str, np.ndarray]  # float64 [points] each


@dataclass(frozen=True, slots=True, eq=False)
class EvalCurve:
    """One metric of one evaluation set with its 95% interval; the bounds are NaN if none was recorded."""

    dataset: str
    metric: str
    steps: np.ndarray  # int64 [points]
    values: np.ndarray  # float64 [points], as are the bounds
    low: np.ndarray
    high: np.ndarray


def metric_names(run: Run) -> list[str]:
    with run.snapshot() as database:
        return [name for (name,) in database.execute(_NAMES, (_MOST_NAMES,))]


def curves(run: Run, names: Iterable[str], max_points: int = MAX_POINTS, *, with_gaps: bool = False) -> list[Curve]:
    """Return the curves of the given names, leaving out those that the run does not have."""
    with run.snapshot() as database:
        found = [curve for name in names if len((curve := read_curve(database, name)).steps)]
        if with_gaps:
            steps = _steps(database)
            found = [_with_gaps(curve, steps) for curve in found]
    return [thinned(curve, max_points) for curve in found]


def spread(
    run: Run, column: Literal["reward", "score", "acc", "length"] = "reward", max_points: int = MAX_BANDS
) -> Band:
    """Return the 10th and 90th percentile over the responses sampled in each step, or NaN if there are none.

    A run of more than `max_points` steps is sampled at evenly spaced steps, the last included.
    """
    if column not in ("reward", "score", "acc", "length"):
        raise ValueError(f"{column} is not a per-response value")
    query = (
        f"SELECT {column} FROM groups CROSS JOIN rollouts USING (serial)"
        f" WHERE generated_step = ? AND {column} IS NOT NULL LIMIT {_MOST_STEPS}"
    )
    quantiles = {}
    with run.snapshot() as database:
        for step in _evenly(_steps(database), max_points):
            found = database.execute(query, (int(step),))
            found.row_factory = None  # no check of each row, which takes long: numpy checks the values all at once
            values = np.array([value for (value,) in found], dtype=np.float64)
            quantiles[step] = np.quantile(values, LEVELS) if len(values) else np.full(len(LEVELS), np.nan)
    table = np.array(list(quantiles.values()), dtype=np.float64).reshape(-1, len(LEVELS)).T
    return Band(np.array(list(quantiles), dtype=np.int64), table)


def verdicts_over_steps(run: Run, max_points: int = MAX_POINTS) -> Parts:
    """Count the groups sampled in each step by the verdict they have now."""
    query = f"SELECT generated_step, verdict, count(*) FROM groups GROUP BY 1, 2 LIMIT {_MOST_STEPS}"
    with run.snapshot() as database:
        return _parts(_steps(database), database.execute(query).fetchall(), max_points)


def tokens_over_steps(run: Run, max_points: int = MAX_POINTS) -> Parts:
    """Return where response tokens came from (`TOKENS_IN`) and where they went (all other parts).

    Both sides have the same sum in every step.
    """
    query = f"SELECT step, name, value FROM metrics WHERE name > 'tokens/' AND name < 'tokens0' LIMIT {_MOST_STEPS}"
    with run.snapshot() as database:
        found = [(step, name.removeprefix("tokens/"), value) for step, name, value in database.execute(query)]
        rows = [row for row in found if row[1] in _TOKENS or row[1].startswith("dropped/")]
        return _parts(_steps(database), rows, max_points)


def evaluations(run: Run) -> list[EvalCurve]:
    found: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
    with run.snapshot() as database:
        query = f"SELECT step, name, metrics FROM evaluations ORDER BY step LIMIT {_MOST_EVALUATIONS}"
        for step, name, metrics in database.execute(query):
            values = metrics_from_json(metrics)
            bounds = {f"{metric}/{end}" for metric in values for end in ("low", "high")}
            for metric in values.keys() - bounds:
                low, high = (values.get(f"{metric}/{end}", np.nan) for end in ("low", "high"))
                found.setdefault((name, metric), []).append((step, values[metric], low, high))
    return [
        EvalCurve(*key, np.array([point[0] for point in points], dtype=np.int64), *table.T)
        for key, points in sorted(found.items())
        for table in [np.array([point[1:] for point in points], dtype=np.float64)]
    ]


def differences(runs: Sequence[Run]) -> dict[str, tuple[str | None, ...]]:
    """Return the options in which the runs differ, except for their names.

    The values are those in each run as JSON, or None if the run does not have the option.
    """
    options = [{key: to_json(value) for key, value in configuration(run).items()} for run in runs]
    keys = dict.fromkeys(key for each in options for key in each if key != "run.name")
    found = {key: tuple(each.get(key) for each in options) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def curves_csv(curves: Sequence[Curve]) -> str:
    """Return a table with a row per step and a column per curve. A cell without a point is empty."""
    columns = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve in curves]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(curve.name for curve in curves)])
    for step in sorted({step for column in columns for step in column}):
        writer.writerow([step, *(column.get(step, "") for column in columns)])
    return text.getvalue()


def read_curve(database: sqlite3.Connection, name: str) -> Curve:
    query = f"SELECT step, value FROM metrics WHERE name = ? ORDER BY step LIMIT {_MOST_STEPS}"
    rows = database.execute(query, (name,)).fetchall()
    steps = np.array([row[0] for row in rows], dtype=np.int64)
    return Curve(name, steps, np.array([row[1] for row in rows], dtype=np.float64))  # None becomes NaN


def thinned(curve: Curve, max_points: int) -> Curve:
    """Return the curve with at most `max_points` points (4 or more), keeping its spikes.

    The curve is cut into equal intervals. The first point stays, and of each interval the smallest, largest and last.
    """
    if len(curve.steps) <= max_points:
        return curve
    chosen = {0}
    for interval in np.array_split(np.arange(len(curve.steps)), max(1, (max_points - 1) // 3)):
        chosen.add(int(interval[-1]))
        numbers = interval[~np.isnan(curve.values[interval])]
        if len(numbers):
            values = curve.values[numbers]
            chosen |= {int(numbers[values.argmin()]), int(numbers[values.argmax()])}
    kept = np.array(sorted(chosen))
    return Curve(curve.name, curve.steps[kept], curve.values[kept])


def _with_gaps(curve: Curve, steps: np.ndarray) -> Curve:
    """Return the curve with NaN in those of the run's `steps`, within its own, that did not record it."""
    within = steps[(steps > curve.steps[0]) & (steps < curve.steps[-1])]
    every = np.union1d(curve.steps, within)
    values = np.full(len(every), np.nan)
    values[np.searchsorted(every, curve.steps)] = curve.values
    return Curve(curve.name, every, values)


def _steps(database: sqlite3.Connection) -> np.ndarray:
    query = f"SELECT step FROM steps ORDER BY step LIMIT {_MOST_STEPS}"
    return np.array([step for (step,) in database.execute(query)], dtype=np.int64)


def _evenly(steps: np.ndarray, at_most: int) -> np.ndarray:
    if len(steps) <= at_most:
        return steps
    return steps[np.linspace(0, len(steps) - 1, at_most).astype(np.int64)]


def _parts(steps: np.ndarray, rows: Sequence[tuple[int, str, float | None]], max_points: int) -> Parts:
    index_of = {int(step): index for index, step in enumerate(steps)}
    parts: dict[str, np.ndarray] = {}
    for step, name, value in rows:
        if step in index_of and value is not None:
            parts.setdefault(name, np.zeros(len(steps)))[index_of[step]] = value
    if len(steps) <= max_points:
        return Parts(steps, dict(sorted(parts.items())))
    # Average over `max_points` intervals, each labeled with its last step.
    starts = np.linspace(0, len(steps), max_points + 1).astype(np.int64)
    sizes = np.diff(starts)
    means = {name: np.add.reduceat(values, starts[:-1]) / sizes for name, values in sorted(parts.items())}
    return Parts(steps[starts[1:] - 1], means)
