"""Curves of accuracy over training seconds: their records, goals, table and plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_common import is_installed, machine

LABELS = {"ours": "dapo", "trl": "TRL", "trl-vllm": "TRL with vLLM"}


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation, and the training up to it."""

    seconds: float  # of training before this evaluation
    step: int
    accuracy: float
    greedy: float
    tokens_generated: int
    groups_generated: int
    groups_kept: int


@dataclass(frozen=True, slots=True)
class Goal:
    """An accuracy to reach within a number of training seconds."""

    kind: str
    accuracy: float
    seconds: float

    def is_met(self, points: Sequence[Point]) -> bool:
        return any(point.accuracy >= self.accuracy and point.seconds <= self.seconds for point in points)


GOALS = (Goal("must", 0.6, 40), Goal("must", 0.8, 198), Goal("aim", 0.6, 20), Goal("aim", 0.9, 198))


def write(out: Path, curves: dict[str, list[Point]]) -> None:
    """Write all points to accuracy.csv, and a plot to accuracy.png, or to accuracy.svg without matplotlib."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "accuracy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["system", *(field.name for field in fields(Point))])
        writer.writeheader()
        for system, points in curves.items():
            writer.writerows({"system": system, **asdict(point)} for point in points)
    if is_installed("matplotlib"):
        _draw(out / "accuracy.png", curves)
    else:
        (out / "accuracy.svg").write_text(svg(curves), encoding="utf-8")


def _draw(path: Path, curves: dict[str, list[Point]]) -> None:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="seconds of training", ylabel="accuracy, 500 held-out questions", ylim=(0, 1), title=machine()
    )
    axes.title.set_fontsize(8)
    for system, points in curves.items():
        axes.plot([p.seconds for p in points], [p.accuracy for p in points], marker=".", label=LABELS[system])
    musts = [goal for goal in GOALS if goal.kind == "must"]
    axes.plot([goal.seconds for goal in musts], [goal.accuracy for goal in musts], "kx", label="must reach")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c")
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 30, 560, 320


def svg(curves: dict[str, list[Point]]) -> str:
    """Draw the same plot without any library."""
    last = max((point.seconds for points in curves.values() for point in points), default=1.0) or 1.0

    def position(seconds: float, accuracy: float) -> str:
        return f"{_LEFT + _WIDTH * seconds / last:.1f},{_TOP + _HEIGHT * (1 - accuracy):.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="400" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="640" height="400" fill="white"/>')
    for tenth in range(0, 11, 2):
        height = _TOP + _HEIGHT * (1 - tenth / 10)
        parts.append(f'<path d="M{_LEFT} {height}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4}" text-anchor="end">{tenth * 10}%</text>')
    for quarter in range(5):
        across = _LEFT + _WIDTH * quarter / 4
        parts.append(
            f'<text x="{across}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{last * quarter / 4:.0f} s</text>'
        )
    for color, (system, points) in zip(_COLORS, curves.items(), strict=False):
        line = " ".join(position(point.seconds, point.accuracy) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        label = f'<text x="{_LEFT + 8}" y="{_TOP + 16 * (1 + _COLORS.index(color))}" fill="{color}">'
        parts.append(f"{label}{LABELS[system]}</text>")
    parts.append(f'<text x="{_LEFT}" y="18">accuracy on 500 held-out questions over seconds of training</text></svg>')
    return "\n".join(parts)


def print_curves(console: Console, curves: dict[str, list[Point]]) -> None:
    for system, points in curves.items():
        table = Table(title=f"{LABELS[system]}: 500 held-out questions, the clock stopped")
        for heading in ("seconds", "step", "accuracy", "greedy", "tokens generated", "groups", "kept"):
            table.add_column(heading, justify="right")
        for p in points:
            table.add_row(
                f"{p.seconds:.1f}", str(p.step), f"{100 * p.accuracy:.1f}%", f"{100 * p.greedy:.1f}%",
                f"{p.tokens_generated:,}", f"{p.groups_generated:,}", f"{p.groups_kept:,}",
            )  # fmt: skip
        console.print(table)
    for goal in GOALS:
        verdict = "reached" if goal.is_met(curves.get("ours", [])) else "missed"
        console.print(f"{goal.kind}: {100 * goal.accuracy:.0f}% within {goal.seconds:.0f} s: {verdict}")
    console.print(machine(), markup=False, highlight=False, soft_wrap=True)
