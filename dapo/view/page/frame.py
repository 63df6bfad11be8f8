"""Parts that all views share: the header, the error box, tables, and the timer that redraws when a run has grown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui

from dapo.errors import CheckpointError
from dapo.view.runs import find_run
from dapo.view.source import Progress, Run, progress

VIEWS = ("curves", "groups", "tokens", "prompts", "health")
LIVE_S = 2.0  # seconds between looks for something new
_DARK_COOKIE = "dapo_dark"

ask = asyncio.to_thread  # for queries: one may take a second, and other pages must not wait for it


@dataclass(frozen=True, slots=True)
class Live:
    """A view that redraws while a run grows. `refresh` must query in threads (`ask`), not in the event loop."""

    refresh: Callable[[], Awaitable[None]]
    watched: Sequence[Run] = ()  # redraw when one of these has made progress; empty: the run of the page
    every: float = LIVE_S  # seconds


def link(run: str, *parts: object) -> str:
    return "/".join(["/run", quote(run, safe=""), *(quote(str(part), safe="") for part in parts)])


def show_site(build: Callable[[], Live]) -> None:
    _header(None, None)
    _keep_live(build(), (), None)


def show_run(root: Path, name: str, view: str, build: Callable[[Run], Live]) -> None:
    step = _header(name, view)
    try:
        run = find_run(root, name)
    except CheckpointError as error:
        _problem_box().set_text(str(error))
        return
    live = build(run)
    _keep_live(live, live.watched or (run,), step)


def grid(
    columns: list[dict[str, Any]],
    row_id: str,
    on_click: Callable[[dict[str, Any]], Any] | None = None,
    *,
    html_columns: Sequence[int] = (),
    **options: Any,
) -> ui.aggrid:
    """Make an empty table; `fill` sets its rows, and a click in one calls `on_click` with the row.

    Cells are text, except in `html_columns`. Text from a run must never get into an HTML column.
    """
    shown = {
        "columnDefs": columns, "rowData": None, ":getRowId": f"params => String(params.data.{row_id})",
        "suppressCellFocus": True, "enableCellTextSelection": True, "domLayout": "autoHeight", "rowHeight": 34,
        "headerHeight": 38, "defaultColDef": {"sortable": True, "resizable": True, "suppressMovable": True},
        "overlayLoadingTemplate": "loading", "overlayNoRowsTemplate": "nothing here", **options,
    }  # fmt: skip
    table = ui.aggrid(shown, html_columns=list(html_columns)).classes("w-full")
    if on_click is not None:
        fields = {column["field"] for column in columns}

        def clicked(event: events.GenericEventArguments) -> Any:
            # A click in the checkbox column selects the row and must not leave the page.
            return on_click(event.args["data"]) if event.args.get("data") and event.args["colId"] in fields else None

        table.classes("opens").on("cellClicked", clicked, ["data", "colId"])
    return table


def fill(table: ui.aggrid, rows: list[dict[str, Any]]) -> None:
    """Replace the rows in place, which keeps the user's selection and sort order."""
    table.run_grid_method("setGridOption", "rowData", rows)


def column(field: str, title: str, **options: Any) -> dict[str, Any]:
    return {"field": field, "headerName": title, **options}


def number_column(field: str, title: str, digits: int | None = None, **options: Any) -> dict[str, Any]:
    form = {} if digits is None else {":valueFormatter": f"p => p.value == null ? '–' : p.value.toFixed({digits})"}
    return column(field, title, type="rightAligned", **form, **options)


def share_column(field: str, title: str, **options: Any) -> dict[str, Any]:
    form = {":valueFormatter": "p => p.value == null ? '–' : (100 * p.value).toFixed(0) + '%'"}
    return number_column(field, title, **form, **options)


def button(text: str, on_click: Callable[..., Any]) -> ui.button:
    return ui.button(text, on_click=on_click).props("outline dense no-caps")


def pager(back: Callable[..., Any], forth: Callable[..., Any]) -> tuple[ui.button, ui.button, ui.label]:
    """Make the buttons for paging through a table, and a label that says what is shown."""
    with ui.row().classes("items-center gap-3"):
        return button("Previous", back), button("Next", forth), ui.label().classes("where")


def offer(choice: ui.select, names: list[str] | dict[str, str]) -> None:
    """Set what can be selected, with its labels if there are any, if it has changed."""
    if names != choice.options:
        choice.set_options(names)


def _header(name: str | None, view: str | None) -> ui.label | None:
    """Draw the header, and return its label for the run's current step."""
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


def _keep_live(live: Live, watched: Sequence[Run], step: ui.label | None) -> None:
    """Redraw when a watched run has made progress. The list of runs watches none, and redraws every time."""
    box = _problem_box()
    box.set_visibility(False)
    box.move(target_index=0)
    busy = asyncio.Lock()
    seen: Sequence[Progress] | None = None

    async def tick() -> None:
        nonlocal seen
        if busy.locked():  # the previous tick still runs
            return
        async with busy:
            try:
                now = [await ask(progress, run) for run in watched]
                if now != seen or not watched:
                    await live.refresh()
                    seen = now
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
