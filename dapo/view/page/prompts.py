"""The prompts view: the hardest, solved or flickering prompts, and the history of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import ui

from dapo.view.page.charts import PALETTE, Line, Look, line_chart
from dapo.view.page.frame import Live, ask, column, fill, grid, link, number_column, pager, share_column
from dapo.view.page.text import display_text
from dapo.view.prompts import HistoryPoint, history, prompts
from dapo.view.source import Run

PAGE = 12  # prompts
_QUESTION = 200  # characters
_ORDERS = {
    "hardest": "lowest pass rate first",
    "solved": "most consecutive groups with every response correct first",
    "flickering": "most changes between mostly correct and mostly wrong first",
}
_NONE = "no such prompts (only prompts whose responses were judged correct or wrong are listed)"


def build(run: Run) -> Live:
    return Live(_Prompts(run).refresh)


class _Prompts:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.offset = 0
        self.chosen: str | None = None  # uid of the prompt whose history is shown
        with ui.row().classes("items-center gap-4"):
            self.order = ui.toggle(list(_ORDERS), value="hardest", on_change=lambda: self._move(-self.offset))
            self.order.props("no-caps dense")
            self.meaning = ui.label().classes("quiet")
        self.back, self.forth, self.where = pager(lambda: self._move(-PAGE), lambda: self._move(PAGE))
        self.table = grid(
            [
                column("question", "question", flex=1, minWidth=240),
                column("data_source", "source", width=150),
                number_column("groups", "groups", width=90),
                number_column("responses", "responses", width=105),
                share_column("pass_rate", "pass rate", width=100),
                share_column("first_pass_rate", "first", width=85),
                share_column("last_pass_rate", "last", width=85),
                number_column("solved_in_a_row", "solved in a row", width=135),
                number_column("flips", "flips", width=80),
            ],
            "uid",
            lambda row: self._draw(str(row["uid"])),
        ).classes("prompts")
        self.detail = ui.column().classes("w-full gap-2")
        with self.detail:
            ui.label("click a prompt to see its history").classes("quiet")

    async def refresh(self) -> None:
        page = await ask(prompts, self.run, self.order.value, self.offset, PAGE)
        self.meaning.set_text(_ORDERS[self.order.value])
        rows = [asdict(row) for row in page.rows]
        for row in rows:
            row["question"] = display_text(row["question"][:_QUESTION])
            row["data_source"] = display_text(row["data_source"], _QUESTION)
        fill(self.table, rows)
        last = self.offset + len(rows)
        self.where.set_text(f"{self.offset + 1:,} to {last:,} of {page.total:,} prompts" if rows else _NONE)
        self.back.set_enabled(self.offset > 0)
        self.forth.set_enabled(last < page.total)
        if self.chosen is not None:
            await self._draw(self.chosen)

    async def _move(self, by: int) -> None:
        self.offset = max(0, self.offset + by)
        await self.refresh()

    async def _draw(self, uid: str) -> None:
        self.chosen = uid
        found = await ask(history, self.run, uid)
        self.detail.clear()
        with self.detail:
            with ui.row().classes("items-center gap-4"):
                ui.label(f"Prompt {display_text(uid, 100)}").classes("font-semibold")
                ui.link(f"its {len(found)} groups", f"{link(self.run.name, 'groups')}?{urlencode({'prompt': uid})}")
            ui.echart(history_chart(found)).classes("w-full h-64 border rounded border-gray-500/30 history")


def history_chart(found: list[HistoryPoint]) -> dict[str, Any]:
    steps = np.array([point.step for point in found], dtype=np.int64)
    rates = np.array([point.pass_rate for point in found], dtype=np.float64)  # None becomes NaN
    chart = line_chart("Pass rate", "share of correct responses", [Line("pass rate", steps, rates, PALETTE[0])], Look())
    chart["series"][0]["showSymbol"] = True
    chart["yAxis"] |= {"min": 0, "max": 1}
    return chart
