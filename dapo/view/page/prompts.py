"""The prompts view: the hardest, solved or flickering prompts, and the history of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args
from urllib.parse import urlencode

import numpy as np
from nicegui import events, ui

from dapo.view.page.charts import PALETTE, Line, Look, line_chart
from dapo.view.page.frame import Live, ask, fill, grid, link, number_column, share_column
from dapo.view.page.text import display_text
from dapo.view.prompts import HistoryPoint, Order, PromptPage, history, prompts
from dapo.view.source import Run

PAGE = 12  # prompts
_QUESTION = 200  # characters
_MEANING = {
    "hardest": "lowest pass rate first",
    "solved": "most consecutive groups with every response correct first",
    "flickering": "most changes between mostly correct and mostly wrong first",
}


def build(run: Run) -> Live:
    return Live(_Prompts(run).refresh)


class _Prompts:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.offset = 0
        self.chosen: str | None = None
        with ui.row().classes("items-center gap-4"):
            self.order = ui.toggle(list(get_args(Order)), value="hardest", on_change=self._reorder).props(
                "no-caps dense"
            )
            self.meaning = ui.label().classes("quiet")
        with ui.row().classes("items-center gap-3"):
            self.back = ui.button("Previous", on_click=lambda: self._move(-PAGE)).props("outline dense no-caps")
            self.forth = ui.button("Next", on_click=lambda: self._move(PAGE)).props("outline dense no-caps")
            self.where = ui.label().classes("where")
        self.table = grid(
            [
                {"field": "question", "headerName": "question", "flex": 1, "minWidth": 240},
                {"field": "data_source", "headerName": "source", "width": 150},
                number_column("groups", "groups", width=90),
                number_column("responses", "responses", width=105),
                share_column("pass_rate", "pass rate", width=100),
                share_column("first_pass_rate", "first", width=85),
                share_column("last_pass_rate", "last", width=85),
                number_column("solved_in_a_row", "solved in a row", width=135),
                number_column("flips", "flips", width=80),
            ],
            "uid",
        ).classes("opens prompts")
        self.table.on("cellClicked", self._choose, ["data"])
        self.detail = ui.column().classes("w-full gap-2")
        with self.detail:
            ui.label("click a prompt to see its history").classes("quiet")

    async def refresh(self) -> None:
        page: PromptPage = await ask(prompts, self.run, self.order.value, self.offset, PAGE)
        self.meaning.set_text(_MEANING[self.order.value])
        rows = [
            {
                **asdict(row),
                "question": display_text(row.question[:_QUESTION]),
                "data_source": display_text(row.data_source, _QUESTION),
            }
            for row in page.rows
        ]
        fill(self.table, rows)
        last = self.offset + len(rows)
        self.where.set_text(
            f"{self.offset + 1:,} to {last:,} of {page.total:,} prompts"
            if rows
            else "no such prompts (only prompts whose responses were judged correct or wrong are listed)"
        )
        self.back.set_enabled(self.offset > 0)
        self.forth.set_enabled(last < page.total)
        if self.chosen is not None:
            await self._draw(self.chosen)

    async def _reorder(self) -> None:
        self.offset = 0
        await self.refresh()

    async def _move(self, by: int) -> None:
        self.offset = max(0, self.offset + by)
        await self.refresh()

    async def _choose(self, event: events.GenericEventArguments) -> None:
        if event.args.get("data"):
            self.chosen = str(event.args["data"]["uid"])
            await self._draw(self.chosen)

    async def _draw(self, uid: str) -> None:
        found: list[HistoryPoint] = await ask(history, self.run, uid)
        self.detail.clear()
        with self.detail:
            with ui.row().classes("items-center gap-4"):
                ui.label(f"Prompt {display_text(uid, 100)}").classes("font-semibold")
                ui.link(f"its {len(found)} groups", _groups_of(self.run, uid))
            ui.echart(history_chart(found)).classes("w-full h-64 border rounded border-gray-500/30 history")


def history_chart(found: list[HistoryPoint]) -> dict[str, Any]:
    steps = np.array([point.step for point in found], dtype=np.int64)
    rates = np.array([np.nan if point.pass_rate is None else point.pass_rate for point in found], dtype=np.float64)
    chart = line_chart("Pass rate", "share of correct responses", [Line("pass rate", steps, rates, PALETTE[0])], Look())
    chart["series"][0]["showSymbol"] = True
    chart["yAxis"] |= {"min": 0, "max": 1}
    return chart


def _groups_of(run: Run, uid: str) -> str:
    return link(run.name, "groups") + "?" + urlencode({"prompt": uid})
