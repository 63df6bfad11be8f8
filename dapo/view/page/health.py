"""The health view: key counters, the events of a run, and why responses could not be judged."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import events, ui

from dapo.view.curves import curves
from dapo.view.health import event_kinds, unjudged
from dapo.view.health import events as read_events
from dapo.view.page.frame import Live, ask, fill, grid, link, number_column
from dapo.view.page.text import display_text, format_time
from dapo.view.source import Run

LIMIT = 50  # events shown
# Metric -> its label, and how it is combined over the steps of the run.
_COUNTERS = {
    "updates/non_finite": ("updates skipped: loss or gradient not finite", "sum"),
    "rollouts/unjudged": ("responses not judged", "sum"),
    "groups/skipped": ("prompts skipped by the ledger", "sum"),
    "logprob_gap/max": ("largest log-probability gap, nats", "max"),
    "staleness/max": ("largest staleness, versions", "max"),
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
        self.events = grid(
            [
                {"field": "time", "headerName": "time (UTC)", "width": 170},
                number_column("step", "step", width=80),
                {"field": "kind", "headerName": "kind", "width": 140},
                {"field": "severity", "headerName": "severity", "width": 100},
                {
                    "field": "message", "headerName": "message", "flex": 1, "minWidth": 300, "wrapText": True,
                    "autoHeight": True, "sortable": False,
                },
            ],
            "id",
        ).classes("opens events")  # fmt: skip
        self.events.on("cellClicked", self._open_step, ["data"])
        ui.label("Why responses could not be judged").classes("text-lg")
        self.reasons = grid(
            [
                number_column("responses", "responses", width=110),
                number_column("first_step", "first step", width=105),
                number_column("last_step", "last step", width=105),
                {"field": "reason", "headerName": "reason", "flex": 1, "minWidth": 300},
            ],
            "reason",
        ).classes("opens reasons")
        self.reasons.on("cellClicked", self._open_reason, ["data"])

    async def refresh(self) -> None:
        counts: dict[str, int] = await ask(event_kinds, self.run)
        if list(counts) != self.kinds.options:
            self.kinds.set_options(list(counts))
        total = sum(count for kind, count in counts.items() if not self.kinds.value or kind in self.kinds.value)
        newest = f"the newest {LIMIT} of {total:,}; " if total > LIMIT else ""
        self.count.set_text(f"{newest}a click opens the groups of the step")
        found = await ask(
            read_events, self.run, tuple(self.kinds.value or ()), limit=LIMIT, newest_first=True
        )  # fmt: skip
        fill(self.events, [_event(each) for each in found])
        reasons = await ask(unjudged, self.run)
        fill(self.reasons, [
            {"reason": each.reason, "responses": each.responses, "first_step": each.first_step,
             "last_step": each.last_step}
            for each in reasons
        ])  # fmt: skip
        counters = await ask(_counters, self.run)
        self.counters.clear()
        with self.counters:
            for label, value in counters:
                with ui.card().classes("p-3 gap-0 items-end"):
                    ui.label(f"{value:,.4g}").classes("text-xl")
                    ui.label(label).classes("quiet text-xs")

    def _open_step(self, event: events.GenericEventArguments) -> None:
        if event.args.get("data"):
            ui.navigate.to(link(self.run.name, "groups") + f"?step={int(event.args['data']['step'])}")

    def _open_reason(self, event: events.GenericEventArguments) -> None:
        if event.args.get("data"):
            query = urlencode({"error": event.args["data"]["reason"]})
            ui.navigate.to(f"{link(self.run.name, 'groups')}?{query}")


def _counters(run: Run) -> list[tuple[str, float]]:
    found = []
    for curve in curves(run, _COUNTERS, max_points=10**9):
        label, kind = _COUNTERS[curve.name]
        known = curve.values[np.isfinite(curve.values)]
        if len(known):
            found.append((label, float(known.sum() if kind == "sum" else known.max())))
    return found


def _event(each: Any) -> dict[str, Any]:
    return {
        "id": each.id,
        "step": each.step,
        "time": format_time(each.time, "%Y-%m-%d %H:%M:%S"),
        "kind": display_text(each.kind, 200),
        "severity": each.severity,
        "message": display_text(each.message, 2000),
    }
