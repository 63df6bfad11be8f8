"""The result of an ablation as one self-contained HTML file: tables, intervals, and curves with bands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo.ablation.records import RunRecord, Status
from dapo.ablation.results import Axis, Result, SetResult, amount
from dapo.ablation.tables import (
    TRAINING_HEADINGS,
    columns,
    difference_text,
    ended_early,
    explanation,
    reached_headings,
    reached_rows,
    training_rows,
    unfinished,
    value_text,
)
from dapo.errors import ConfigError
from dapo.terminal.evaltable import is_rate, number
from dapo.view.document import write_document
from dapo.view.page.charts import PALETTE, Line, Look, line_chart

Points = tuple[np.ndarray, np.ndarray]  # x and y of one run
_AXES: dict[Axis, str] = {"step": "steps", "seconds": "seconds of training", "tokens": "generated tokens"}
_X_TICK = "value => dapo.tick(+value.toFixed(value < 100 ? 1 : 0))"


def write_report(result: Result, out: Path) -> str:
    """Write the report and return a line that says so, or a line that says why not if NiceGUI is not installed."""
    plan = result.plan
    facts = {
        "recipe": plan.recipe,
        "model": plan.config.model.path,
        "budget of a run": str(plan.budget),
        "seeds": ", ".join(map(str, plan.seeds)),
        "compared with": plan.reference,
    }
    try:
        write_document(
            out,
            Path(__file__).parent / "ablation.html",
            name=f"Ablation of {plan.recipe}",
            kind="an ablation by dapo",
            facts=facts,
            sets=[_set_values(result, found) for found in result.sets],
            training_headings=("arm", *TRAINING_HEADINGS),
            training=list(training_rows(result)),
            sentences=[*explanation(result), *result.notes, *ended_early(result.runs)],
            arms=[(arm.name, " ".join(plan.options_of(arm)) or "as the recipe") for arm in plan.arms],
            unfinished=unfinished(result.runs),
            run_headings=("run", "status", *(f"{found.name}, last" for found in result.sets)),
            runs=[(run.name, run.status, *_last(run, result.sets)) for run in result.runs],
            folder=str(plan.out),
            charts=list(_charts(result)),
        )
    except ConfigError as error:
        return f"no report was written: {error}"
    return f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB) and ablation.json beside it"


def _last(run: RunRecord, sets: Sequence[SetResult]) -> list[str]:
    """Return a run's last evaluation of each set."""
    return [
        number(found.metric, evaluations[-1].mean)
        if (evaluations := run.evaluations.get(found.name)) and run.metric[found.name] == found.metric
        else "-"
        for found in sets
    ]


def _set_values(result: Result, found: SetResult) -> dict[str, Any]:
    """Return what the template shows of one set. Intervals are drawn on one scale per column."""
    places = columns(result, found)
    rows = []
    for arm in found.arms:
        cells = []
        for where, _ in places:
            each = arm.differences.get(where)
            reach = max(
                (abs(end) for other in found.arms if (d := other.differences.get(where)) for end in (d.low, d.high)
                 if math.isfinite(end)), default=1.0,
            ) or 1.0  # fmt: skip
            cell = {"value": value_text(found, arm, where), "text": "", "verdict": "", "drawn": None}
            if each is not None:
                cell |= {"text": difference_text(found.metric, each), "verdict": each.verdict}
                if math.isfinite(each.low):
                    cell["drawn"] = [80 + 75 * end / reach for end in (each.low, each.value, each.high)]
            cells.append(cell)
        rows.append((arm.arm, len(arm.seeds), number(found.metric, arm.base), cells))
    return {
        "name": found.name,
        "metric": found.metric + (" in %" if is_rate(found.metric) else ""),
        "questions": found.questions,
        "headings": [heading for _, heading in places],
        "rows": rows,
        "reached_headings": ("arm", *reached_headings(found)),
        "reached": list(reached_rows(found)),
    }


def _charts(result: Result) -> Iterator[dict[str, Any]]:
    for found in result.sets:
        for axis, title in _AXES.items():
            by_arm = [
                [run for run in result.of_arm(arm.name) if run.metric.get(found.name) == found.metric]
                for arm in result.plan.arms
            ]
            end = max(amount(run.evaluations[found.name][-1], axis) for runs in by_arm for run in runs)
            curves = [[_evaluation_points(run, found.name, axis, end) for run in runs] for runs in by_arm]
            unit = f"{found.metric}{' in %' * is_rate(found.metric)}, mean over seeds; shaded: lowest to highest seed"
            yield _chart(result, f"{found.name} by {title}", unit, curves, axis)
    if not result.sets:
        return
    for metric, title, unit in (
        ("entropy", "Entropy", "nats per token"),
        ("response_length/mean", "Response length", "tokens"),
    ):
        curves = [
            [(run.curves["step"], run.curves[metric]) for run in result.of_arm(arm.name)] for arm in result.plan.arms
        ]
        yield _chart(result, title, f"{unit}, mean over seeds; shaded: lowest to highest seed", curves, "step")


def _chart(result: Result, title: str, unit: str, curves: Sequence[Sequence[Points]], axis: Axis) -> dict[str, Any]:
    lines = []
    for index, (arm, members) in enumerate(zip(result.plan.arms, curves, strict=True)):
        if members:
            x, mean, low, high = band(members)
            lines.append(Line(arm.name, x, mean, PALETTE[index % len(PALETTE)], "solid", low, high))
    chart = line_chart(title, unit, lines, Look(), axis=axis)
    chart["grid"]["right"] = 60  # for the name of the axis
    # The last tick is where the data ends, not a round number: round it, and end it where the axis ends.
    chart["xAxis"]["axisLabel"] |= {":formatter": _X_TICK, "alignMaxLabel": "right"}
    for series in chart["series"]:
        if series["name"] in chart["legend"]["data"]:
            series["showSymbol"] = len(series["data"]) < 30
    return chart


def _evaluation_points(run: RunRecord, name: str, axis: Axis, end: float) -> Points:
    found = run.evaluations[name]
    if run.status == Status.ENDED_EARLY:
        found = [*found, found[-1]]
    x = np.array([amount(each, axis) for each in found])
    if run.status == Status.ENDED_EARLY:  # its last evaluation is carried forward to the end of the budget
        x[-1] = max(x[-1], end)
    return x, np.array([each.mean for each in found]) * (100 if is_rate(run.metric[name]) else 1)


def band(members: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x, mean, lowest and highest of several curves, interpolated linearly between the values of each.

    The band lies where all curves have values, so that none drops out of the mean. A curve without any is left out.
    """
    curves = [(x[known], y[known]) for x, y in members if (known := ~np.isnan(y)).any()]
    if not curves:
        return np.array([]), np.array([]), np.array([]), np.array([])
    x = np.unique(np.concatenate([x for x, _ in curves]))
    x = x[(max(x[0] for x, _ in curves) <= x) & (x <= min(x[-1] for x, _ in curves))]
    table = np.array([np.interp(x, own, y) for own, y in curves])
    return x, table.mean(axis=0), table.min(axis=0), table.max(axis=0)
