"""The curves view: panels of curves, and the controls for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from nicegui import ui

from dapo.errors import CheckpointError
from dapo.view import curves as read
from dapo.view.page.charts import Look
from dapo.view.page.frame import Live, ask, button, column, grid, link, offer
from dapo.view.page.panels import Loaded, all_charts, load
from dapo.view.runs import find_run
from dapo.view.source import Run

_MAX_RUNS = 8
_OPEN_ROWS = 4  # a longer table of differing options starts collapsed
_FIRST_PANELS = 2
_HEAD_START = 0.3  # seconds for the browser to draw the first panels
_WAITING = "waiting"


def build(root: Path, run: Run, others: Sequence[str]) -> Live:
    runs, problems = _find_runs(root, run, others)
    for problem in problems:
        ui.label(problem).classes("problem text-red-600")
    if len(runs) > 1:
        _differences(runs)
    return Live(_Curves(runs).refresh, runs)


class _Curves:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.loaded: list[Loaded] = []
        self.charts: dict[str, ui.echart] = {}
        with ui.row().classes("items-center gap-6 w-full"):
            ui.label("smoothing").classes("quiet")
            self.smoothing = ui.slider(min=0, max=0.99, step=0.01, value=0, on_change=lambda: self.draw())
            self.smoothing.classes("w-48").props('label aria-label="smoothing"')
            self.log = ui.switch("logarithmic", on_change=lambda: self.draw())
            self.chosen = ui.select([], label="more metrics", multiple=True, on_change=self.refresh)
            self.chosen.classes("w-64").props("use-input use-chips dense input-debounce=0")
            ui.label("shift + wheel zooms a panel").classes("quiet text-sm")
            ui.space()
            button("CSV of all metrics", self.download)
        columns = "display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 12px"
        self.place = ui.element("div").classes("w-full curves").style(columns)
        with self.place:
            # An empty chart makes the browser fetch the chart library while the database is read.
            self.charts[_WAITING] = ui.echart({"series": []}).classes("w-full h-64 waiting")

    async def refresh(self) -> None:
        self.loaded = [await ask(load, run, self.chosen.value) for run in self.runs]
        if _WAITING in self.charts:
            # Draw the top panels first: drawing all of them keeps a browser busy for a while.
            self.draw(_FIRST_PANELS)
            await asyncio.sleep(_HEAD_START)
        self.draw()
        offer(self.chosen, sorted({name for run in self.runs for name in await ask(read.metric_names, run)}))

    def draw(self, at_most: int | None = None) -> None:
        look = Look(self.smoothing.value or 0.0, bool(self.log.value))
        wanted = all_charts(self.loaded, look, self.chosen.value)
        for key in self.charts.keys() - wanted.keys():
            self.charts.pop(key).delete()
        for index, (key, options) in enumerate(list(wanted.items())[:at_most]):
            if key in self.charts:
                self.charts[key].options.clear()
                self.charts[key].options.update(options)
                self.charts[key].update()
            else:
                with self.place:
                    self.charts[key] = ui.echart(options).classes("w-full h-64 border rounded border-gray-500/30")
                self.charts[key].move(target_index=index)

    async def download(self) -> None:
        for run in self.runs:
            found = await ask(lambda run=run: read.curves(run, read.metric_names(run), max_points=10**9))
            ui.download.content(read.curves_csv(found), f"{run.name}.csv", "text/csv")


def _find_runs(root: Path, run: Run, others: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Return the runs to draw, and a sentence for each that cannot be."""
    runs, problems = [run], []
    for name in dict.fromkeys(others):
        try:
            found = find_run(root, name)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            runs += [found] if found not in runs else []
    if len(runs) > _MAX_RUNS:
        problems.append(f"only the first {_MAX_RUNS} runs are shown")
    return runs[:_MAX_RUNS], problems


def _differences(runs: Sequence[Run]) -> None:
    """Show the options in which the runs differ. Columns are keyed by number, because a run's name can be any text."""
    try:
        found = read.differences(runs)
    except CheckpointError as error:
        ui.label(str(error)).classes("problem")
        return
    columns = [column("key", "option", flex=1)]
    columns += [column(f"run{index}", run.name, flex=1) for index, run in enumerate(runs)]
    rows = [
        {"key": key, **{f"run{index}": value or "–" for index, value in enumerate(values)}}
        for key, values in found.items()
    ]
    # A long list starts collapsed, so that the curves stay in view.
    box = ui.expansion(f"{len(rows)} options in which these runs differ", value=len(rows) <= _OPEN_ROWS)
    with box.classes("w-full border rounded border-gray-500/30"):
        grid(columns, "key", rowData=rows).classes("differences")
    with ui.row().classes("gap-4"):
        for run in runs:
            ui.link(run.name, link(run.name, "curves"))
