"""`dapo metrics`: the metrics of every step, the evaluations and the newest events, as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.store.configuration import DATABASE_FILE
from dapo.store.database import RunDatabase
from dapo.store.encoding import to_text, visible
from dapo.terminal.evaltable import summary
from dapo.types import EventKind

_COLUMNS = {
    "score": "score/mean",
    "reward": "reward/mean",
    "acc": "acc/mean",
    "length": "response_length/mean",
    "entropy": "entropy",
    "kept": "groups/kept",
    "dropped": "groups/dropped",
    "tokens": "tokens/generated",
    "s/step": "timing_s/step",
}
_USUAL = (EventKind.DATA, EventKind.PLAN, EventKind.FINISHED)  # every run has these events, so they are not shown
_NEWEST = 5


def json_lines(run: Path) -> Iterator[str]:
    """Yield one JSON object per step. A metric that is not finite is null, because JSON has no NaN."""
    # Read everything first: the consumer of the lines may be slow, and must not keep the database open.
    with RunDatabase.open_readonly(run / DATABASE_FILE) as database:
        steps = list(database.steps())
    for step in steps:
        yield json.dumps({name: value if math.isfinite(value) else None for name, value in step.items()})


def print_history(console: Console, run: Path) -> None:
    with RunDatabase.open_readonly(run / DATABASE_FILE) as database:
        steps, evaluations = list(database.steps()), list(database.evals())
        events = [event for event in database.events() if event["kind"] not in _USUAL]
    if steps:
        console.print(_table(escape(visible(to_text(str(run)))), steps))
    for found in evaluations:
        _say(console, f"evaluation of {found['name']} at step {found['step']}: {summary(found['metrics'])}")
    if len(events) > _NEWEST:
        _say(console, f"{len(events)} events; the newest are:")
    for event in events[-_NEWEST:]:
        _say(console, f"{event['kind']} at step {event['step']}: {event['message']}")


def _table(title: str, steps: Sequence[dict[str, Any]]) -> Table:
    columns = {heading: name for heading, name in _COLUMNS.items() if any(name in step for step in steps)}
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("step", *columns):
        table.add_column(heading, justify="right")
    for step in steps:
        table.add_row(str(step["step"]), *(_cell(step.get(name)) for name in columns.values()))
    return table


def _say(console: Console, line: str) -> None:
    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"
