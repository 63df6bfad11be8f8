"""The table of runs: click one to open it, select several to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import ui

from dapo.view.page.frame import Live, ask, button, column, fill, grid, link, number_column
from dapo.view.page.text import display_text, format_time
from dapo.view.runs import RunSummary, ablation_report, runs_folder, summaries

_LIMIT = 200
_WIDTH, _HEIGHT = 120, 24  # of a sparkline, in pixels


def build(root: Path) -> Live:
    ui.label(f"Runs in {runs_folder(root)}").classes("text-xl")
    if ablation_report(root):
        ui.link("Result of the ablation: tables, intervals and curves of its arms", "/ablation").classes("ablation")
    # An unreadable run has no recipe and no time: its problem spans these columns.
    span = {":colSpan": "p => p.data.status === 'unreadable' ? 3 : 1"}
    table = grid(
        [
            column("name", "run", width=190),
            column("status", "status", width=110),
            number_column("step", "step", width=80),
            number_column("planned", "of", width=80),
            number_column("reward", "reward", 3, width=100),
            column("curve", "reward curve", width=160, sortable=False),
            column("model", "model", width=260, tooltipField="model", **span),
            column("recipe", "recipe", width=120),
            column("changed", "last change (UTC)", width=160),
        ],
        "name",
        lambda row: ui.navigate.to(link(row["name"], "curves")),
        html_columns=[5],
        rowSelection={"mode": "multiRow", "enableClickSelection": False},
    )
    with ui.row():
        button("Compare selected runs", lambda: _compare(table))
        more = ui.label().classes("quiet self-center")

    async def refresh() -> None:
        found = await ask(summaries, root, limit=_LIMIT)
        fill(table, [_row(each) for each in found])
        more.set_text(f"the newest {_LIMIT} are shown" if len(found) == _LIMIT else "")

    return Live(refresh, every=5.0)  # summarizing many runs takes longer than reading the progress of one


def sparkline(values: np.ndarray) -> str:
    """Return a small SVG. It goes into the page as HTML, so it may contain nothing but numbers."""
    indices = np.flatnonzero(np.isfinite(values))
    if len(indices) < 2:
        return ""
    known = values[indices]
    low, high = float(known.min()), float(known.max())
    x = 2 + indices / max(1, len(values) - 1) * (_WIDTH - 4)
    y = 2 + (1 - (known - low) / ((high - low) or 1.0)) * (_HEIGHT - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="display:block;margin-top:4px">'
        f'<polyline points="{points}" fill="none" stroke="#3b82f6" stroke-width="1.5"/></svg>'
    )


def _row(found: RunSummary) -> dict[str, Any]:
    if found.problem is not None:
        return {"name": found.name, "status": "unreadable", "model": display_text(found.problem, 500), "curve": ""}
    return {
        "name": found.name,
        "status": found.status,
        "step": found.step,
        "planned": found.planned or None,
        "reward": found.reward,
        "curve": sparkline(found.rewards),
        "model": display_text(found.model),
        "recipe": display_text(found.recipe),
        "changed": format_time(found.changed),
    }


async def _compare(table: ui.aggrid) -> None:
    names = [row["name"] for row in await table.get_selected_rows() if row["status"] != "unreadable"]
    if not names:
        ui.notify("select runs with the checkboxes on the left first")
        return
    others = [("other", name) for name in names[1:]]
    ui.navigate.to(link(names[0], "curves") + (f"?{urlencode(others)}" if others else ""))
