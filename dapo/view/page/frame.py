"""Parts that all views share: the header, the error box, tables, and the timer that redraws when a run has grown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import ui

from dapo.errors import CheckpointError
from dapo.view.runs import find_run
from dapo.view.source import Progress, Run, progress

VIEWS = ("curves", "groups", "tokens", "prompts", "health")
LIVE_S = 2.0  # seconds between looks for something new
_DARK_COOKIE = "dapo_dark"

_STYLE = """
body { font-variant-numeric: tabular-nums; }
.model-text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: 13px; line-height: 1.5; margin: 0; }
.quiet { opacity: .65; }
.name-values { display: grid; grid-template-columns: auto 1fr; gap: 0 12px; font-size: 13px; }
.name-values > :nth-child(even) { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ag-right-aligned-cell { font-variant-numeric: tabular-nums; }
.ag-cell { cursor: default; }
.opens .ag-row { cursor: pointer; }
.nicegui-aggrid { height: auto; }
.ag-center-cols-viewport { min-height: 34px !important; }
.q-btn--dense { padding: 2px 12px; }
.nicegui-content { padding: 16px; gap: 12px; }
"""


@dataclass(slots=True)
class Live:
    """A view that redraws while a run grows. `refresh` must query in threads (`ask`), not in the event loop."""

    refresh: Callable[[], Awaitable[None]]
    watched: Sequence[Run] = ()  # redraw when one of these has made progress; empty: redraw every time
    every: float = LIVE_S  # seconds
    seen: Sequence[Progress] | None = None  # progress of the watched runs at the last redraw


def link(run: str, *parts: object) -> str:
    return "/".join(["/run", quote(run, safe=""), *(quote(str(part), safe="") for part in parts)])


def show_site(build: Callable[[], Live]) -> None:
    _frame(None, None)
    _live(build(), None)


def show_run(root: Path, name: str, view: str, build: Callable[[Run], Live]) -> None:
    step = _frame(name, view)
    try:
        run = find_run(root, name)
    except CheckpointError as error:
        _problem_box().set_text(str(error))
        return
    live = build(run)
    live.watched = live.watched or (run,)
    _live(live, step)


async def ask(query: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """Run a query in a thread. It may take a second, and other pages must not wait for it."""
    return await asyncio.to_thread(query, *values, **options)


def grid(columns: list[dict[str, Any]], row_id: str, *, html_columns: Sequence[int] = (), **options: Any) -> ui.aggrid:
    """Make an empty table; `fill` sets its rows.

    Cells are text, except in `html_columns`. Text from a run must never get into an HTML column.
    """
    return ui.aggrid(
        {
            "columnDefs": columns,
            "rowData": [],
            ":getRowId": f"params => String(params.data.{row_id})",
            "suppressCellFocus": True,
            "enableCellTextSelection": True,
            "domLayout": "autoHeight",
            "rowHeight": 34,
            "headerHeight": 38,
            "defaultColDef": {"sortable": True, "resizable": True, "suppressMovable": True},
            "overlayNoRowsTemplate": "nothing here",
            **options,
        },
        html_columns=list(html_columns),
    ).classes("w-full")


def fill(table: ui.aggrid, rows: list[dict[str, Any]]) -> None:
    """Replace the rows in place, which keeps the user's selection and sort order."""
    table.run_grid_method("setGridOption", "rowData", rows)


def number_column(field_name: str, title: str, digits: int | None = None, **options: Any) -> dict[str, Any]:
    column = {"field": field_name, "headerName": title, "type": "rightAligned", **options}
    if digits is not None:
        column[":valueFormatter"] = f"p => p.value == null ? '–' : p.value.toFixed({digits})"
    return column


def share_column(field_name: str, title: str, **options: Any) -> dict[str, Any]:
    shown = "p => p.value == null ? '–' : (100 * p.value).toFixed(0) + ' %'"
    return {"field": field_name, "headerName": title, "type": "rightAligned", ":valueFormatter": shown, **options}


def name_values(rows: Sequence[tuple[str, str]]) -> None:
    with ui.element("div").classes("name-values w-full"):
        for name, value in rows:
            ui.label(name).classes("quiet")
            ui.label(value)


def _frame(name: str | None, view: str | None) -> ui.label | None:
    """Draw the header, and return its label for the run's current step."""
    ui.add_css(_STYLE)
    request = ui.context.client.request
    chosen = request.cookies.get(_DARK_COOKIE) if request else None
    dark = ui.dark_mode(None if chosen is None else chosen == "1")
    ui.page_title(f"{name} · {view} · dapo" if name else "dapo")
    with ui.header().classes("items-center gap-4 px-4 py-2 bg-slate-800 text-white"):
        ui.link("dapo", "/").classes("text-lg font-bold text-white no-underline")
        ui.link("runs", "/").classes("text-white" + (" no-underline" if name else " font-bold underline"))
        if name:
            ui.label(name).classes("opacity-80")
            for each in VIEWS:
                weight = " font-bold underline" if each == view else " no-underline"
                ui.link(each, link(name, each)).classes("text-white" + weight)
        ui.space()
        step = ui.label().classes("opacity-80 step") if name else None
        # The server stores nothing about users. This one choice is kept in a cookie.
        toggle = ui.button(icon="contrast", on_click=lambda: _toggle(dark)).props("flat round dense color=white")
        toggle.tooltip("light or dark").props('aria-label="light or dark"')
    return step


async def _toggle(dark: ui.dark_mode) -> None:
    is_dark = await ui.run_javascript("document.body.classList.contains('body--dark')")
    dark.set_value(not is_dark)
    ui.run_javascript(f"document.cookie = '{_DARK_COOKIE}={int(not is_dark)}; path=/; samesite=strict'")


def _problem_box() -> ui.label:
    return ui.label().classes("w-full p-3 rounded bg-red-700 text-white problem")


def _live(live: Live, step: ui.label | None) -> None:
    box = _problem_box()
    box.set_visibility(False)
    box.move(target_index=0)
    busy = asyncio.Lock()

    async def tick() -> None:
        if busy.locked():  # the previous tick still runs
            return
        async with busy:
            try:
                now = [await ask(progress, run) for run in live.watched]
                # The list of runs watches none, because any run may have changed: it redraws every time.
                if now != live.seen or not live.watched:
                    await live.refresh()
                    live.seen = now
                if step is not None:
                    step.set_text(f"step {now[0].step:,}")
                box.set_visibility(False)
            except CheckpointError as error:
                box.set_text(str(error))
                box.set_visibility(True)
            except RuntimeError:
                if not box.is_deleted:  # a deleted box means that the page was closed during the query
                    raise

    ui.timer(live.every, tick)
