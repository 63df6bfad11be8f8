"""The health view: key counters, the events of a run, and why responses could not be judged."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import ui

from dapo.view.curves import curves
from dapo.view.health import EventRow, event_kinds, newest_events, unjudged
from dapo.view.page.frame import Live, ask, column, fill, grid, link, number_column, offer
from dapo.view.page.text import display_text, format_time
from dapo.view.source import Run

LIMIT = 50  # events shown
# Metric -> its label, and how it is combined over the steps of the run.
_COUNTERS = {
    "updates/non_finite": ("updates skipped: loss or gradient not finite", np.sum),
    "rollouts/unjudged": ("responses not judged", np.sum),
    "groups/skipped": ("prompts skipped by the ledger", np.sum),
    "logprob_gap/max": ("largest log-probability gap, nats", np.max),
    "staleness/max": ("largest staleness, versions", np.max),
}


def build(run: Run) -> Live:
    return Live(_Health(run).refresh)


class _Health:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.counters = ui.row().classes("gap-3 w-full")
        with ui.row().classes("items-center gap-4"):
            ui.label("Events").classes("text-lg")
            self.kinds = ui.select([], label="kind", multiple=True, on_change=self.refresh)
            self.kinds.classes("w-56").props("use-chips dense")
            self.count = ui.label().classes("quiet text-sm")
        wide = {"flex": 1, "minWidth": 300}
        self.events = grid(
            [
                column("time", "time (UTC)", width=170),
                number_column("step", "step", width=80),
                column("kind", "kind", width=140),
                column("severity", "severity", width=100),
                column("message", "message", **wide, wrapText=True, autoHeight=True, sortable=False),
            ],
            "id",
            lambda row: self._open_groups(step=int(row["step"])),
        ).classes("events")
        ui.label("Why responses could not be judged").classes("text-lg")
        self.reasons = grid(
            [
                number_column("responses", "responses", width=110),
                number_column("first_step", "first step", width=105),
                number_column("last_step", "last step", width=105),
                column("reason", "reason", **wide),
            ],
            "reason",
            lambda row: self._open_groups(error=row["reason"]),
        ).classes("reasons")

    async def refresh(self) -> None:
        counts = await ask(event_kinds, self.run)
        offer(self.kinds, list(counts))
        chosen = self.kinds.value or counts.keys()
        total = sum(counts[kind] for kind in counts.keys() & chosen)
        newest = f"the newest {LIMIT} of {total:,}; " if total > LIMIT else ""
        self.count.set_text(f"{newest}a click opens the groups of the step")
        found = await ask(newest_events, self.run, self.kinds.value, limit=LIMIT)
        fill(self.events, [_event(each) for each in found])
        fill(self.reasons, [asdict(each) for each in await ask(unjudged, self.run)])
        counters = await ask(_counters, self.run)
        self.counters.clear()
        with self.counters:
            for label, value in counters:
                with ui.card().classes("p-3 gap-0 items-end"):
                    ui.label(f"{value:,.4g}").classes("text-xl")
                    ui.label(label).classes("quiet text-xs")

    def _open_groups(self, **query: Any) -> None:
        ui.navigate.to(f"{link(self.run.name, 'groups')}?{urlencode(query)}")


def _counters(run: Run) -> list[tuple[str, float]]:
    found = []
    for curve in curves(run, _COUNTERS, max_points=10**9):
        label, combine = _COUNTERS[curve.name]
        known = curve.values[np.isfinite(curve.values)]
        if len(known):
            found.append((label, float(combine(known))))
    return found


def _event(each: EventRow) -> dict[str, Any]:
    return {
        **asdict(each),
        "time": format_time(each.time, "%Y-%m-%d %H:%M:%S"),
        "kind": display_text(each.kind, 200),
        "severity": each.severity,
        "message": display_text(each.message, 2000),
    }
