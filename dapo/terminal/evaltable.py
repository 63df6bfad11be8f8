"""Tables of evaluations: the metrics of each model with their intervals, and the differences between models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table

_RATES = re.compile(r"(avg|pass|maj)@\d+|parse_rate|response_length/clip_ratio")
_WIDE = 110
_LEGEND = " (rates in %, below them 95% intervals)"
_HEADINGS = {
    "parse_rate": "parsed", "response_length/clip_ratio": "cut off", "response_length/mean": "length",
    "reward/mean": "reward",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One model's evaluation of one set."""

    model: str
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """The difference of one metric between a model and the first model, on the problems that both were judged on."""

    model: str
    figure: str  # the metric's name; called so in the JSON of `dapo eval`
    value: float
    low: float
    high: float
    problems: int

    @property
    def verdict(self) -> str:
        if math.isnan(self.low):
            return "too few questions in common"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference shown"


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the main metrics: avg@k, pass@k and maj@k, or the reward if responses have no accuracy."""
    averages = [name for name in metrics if re.fullmatch(r"avg@\d+", name)]
    if not averages:
        return ["reward/mean"]
    k = averages[0].removeprefix("avg@")
    return [name for name in (f"avg@{k}", f"pass@{k}", f"maj@{k}") if name in metrics]


def summary(metrics: Mapping[str, float]) -> str:
    """Return one line with the main metrics, the reward and the response length."""
    names = [*headline(metrics), "reward/mean", "response_length/mean", "response_length/clip_ratio"]
    parts = [f"{heading(name)} {with_interval(metrics, name)}" for name in dict.fromkeys(names) if name in metrics]
    if unjudged := metrics.get("unjudged"):
        parts.append(f"{unjudged:.0f} unjudged")
    return "  ".join(parts)


def heading(name: str) -> str:
    return _HEADINGS.get(name, name)


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """Format a metric with its interval, such as `12.5% [10.1, 15.0]`; rates are in percent."""
    if name not in metrics:
        return ""
    text = number(name, metrics[name]) + ("%" if is_rate(name) and not math.isnan(metrics[name]) else "")
    if f"{name}/low" in metrics and f"{name}/high" in metrics:
        low, high = (number(name, metrics[f"{name}/{end}"]) for end in ("low", "high"))
        text += f" [{low}, {high}]"
    return text


def number(name: str, value: float) -> str:
    """Format the value of a metric without its unit; rates are in percent."""
    if math.isnan(value):
        return "-"
    if is_rate(name):
        return f"{100 * value:.1f}"
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    return f"{value:.1f}" if name.startswith("response_length") else f"{value:.3f}"


def is_rate(name: str) -> bool:
    return _RATES.fullmatch(name) is not None


def models_table(title: str, rows: Sequence[EvalRow], width: int) -> Table:
    """Show one row per model, with rates in percent and the intervals of the main metrics below them.

    A narrow terminal shows no pass@2, pass@4, ... All metrics and intervals are in the database and in the JSON.
    """
    first = rows[0].metrics
    main = headline(first)
    passes = [name for name in first if re.fullmatch(r"pass@\d+", name) and name not in main and name != "pass@1"]
    others = ["parse_rate", "response_length/clip_ratio", "response_length/mean", "unjudged"]
    names = [*main[:1], *(passes if width >= _WIDE else ()), *main[1:], *others]
    names = [name for name in names if any(name in row.metrics for row in rows)]
    if not any(row.metrics.get("unjudged") for row in rows):
        names.remove("unjudged")
    table = _table(title + _LEGEND)
    for name in names:
        table.add_column(heading(name), justify="right", no_wrap=True, min_width=len(heading(name)))
    table.add_column("s", justify="right")
    for row in rows:
        cells = [_cell(row.metrics, name, name in main) for name in names]
        table.add_row(escape(row.model), *cells, f"{row.seconds:.0f}")
    return table


def with_sign(row: DifferenceRow) -> str:
    """Format a difference, such as `+4.5 points [+2.1, +6.9]`."""
    if math.isnan(row.value):
        return "-"
    scale, unit, form = (100, " points", "+.1f") if is_rate(row.figure) else (1, "", "+.3f")
    value, low, high = (format(scale * each, form) for each in (row.value, row.low, row.high))
    return f"{value}{unit}" if math.isnan(row.low) else f"{value}{unit} [{low}, {high}]"


def differences_table(first: str, rows: Sequence[DifferenceRow]) -> Table:
    table = _table(f"difference from {first}, over the questions judged for both")
    table.add_column("metric")
    table.add_column(escape("difference [95%]"), justify="right")
    table.add_column("questions", justify="right")
    table.add_column("")
    for row in rows:
        cells = (escape(row.model), heading(row.figure), escape(with_sign(row)), str(row.problems))
        table.add_row(*cells, in_color(row.verdict))
    return table


def in_color(verdict: str) -> str:
    """Return the verdict on a difference as markup."""
    style = {"better": "green", "worse": "red"}.get(verdict, "dim")
    return f"[{style}]{verdict}[/]"


def _table(title: str) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    return table


def _cell(metrics: Mapping[str, float], name: str, has_interval: bool) -> str:
    if name not in metrics:
        return ""
    text = f"{metrics[name]:.0f}" if name == "unjudged" else number(name, metrics[name])
    if has_interval and f"{name}/low" in metrics:
        text += "\n" + "–".join(number(name, metrics[f"{name}/{end}"]) for end in ("low", "high"))
    return text
