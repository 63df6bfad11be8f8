"""The panels of curves, of one run or several over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nicegui import ui

from dapo.errors import CheckpointError
from dapo.view import curves as read
from dapo.view.export import curves_csv
from dapo.view.page.charts import Line, Look, Zone, color_of, line_chart, stacked_chart
from dapo.view.page.frame import Live, ask, grid, link
from dapo.view.runs import find_run
from dapo.view.source import Run, configuration

_MAX_RUNS = 8
_OPEN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that are looked at together: the names of figures, and what they are called here."""

    title: str
    unit: str
    figures: Mapping[str, str]
    spread: str | None = None  # the column of single responses whose 10 to 90 % are shaded around the first figure


PANELS = (
    Panel("Reward", "mean over responses; shaded: 10 to 90 %", {"reward/mean": "reward"}, "reward"),
    Panel("Accuracy", "share of right responses", {"acc/mean": "accuracy"}),
    Panel(
        "Response length",
        "tokens; shaded: 10 to 90 %",
        {"response_length/mean": "mean", "response_length/max": "longest"},
        "length",
    ),
    Panel("Entropy", "nats per token", {"entropy": "entropy"}),
    Panel(
        "Clip fractions",
        "share of trained tokens",
        {"clip_fraction/low": "low", "clip_fraction/high": "high", "clip_fraction/dual": "dual"},
    ),
    Panel("Gradient norm", "mean over the updates of a step", {"grad_norm": "gradient norm"}),
    Panel(
        "Sampler and trainer gap",
        "|difference of log-probabilities|, nats",
        {"logprob_gap/mean": "mean", "logprob_gap/max": "largest"},
    ),
    Panel(
        "Throughput",
        "tokens per second",
        {"throughput/generated_tokens_per_s": "generated", "throughput/trained_tokens_per_s": "trained"},
    ),
)
_PHASES = {"timing_s/generate": "generate", "timing_s/reward": "reward", "timing_s/train": "train"}


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """All that the panels of one run need, read once per step."""

    name: str
    curves: Mapping[str, read.Curve]
    bands: Mapping[str, read.Band]
    verdicts: read.Parts
    tokens: read.Parts
    evaluations: Sequence[read.EvalCurve]
    zone: Zone | None


def build(root: Path, run: Run, others: Sequence[str]) -> Live:
    runs, problems = _found(root, run, others)
    for problem in problems:
        ui.label(problem).classes("problem text-red-600")
    if len(runs) > 1:
        _differences(runs)
    view = _Curves(runs)
    return Live(view.refresh, runs)


class _Curves:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.loaded: list[_Loaded] = []
        self.charts: dict[str, ui.echart] = {}
        with ui.row().classes("items-center gap-6 w-full"):
            ui.label("smoothing").classes("quiet")
            self.smoothing = ui.slider(min=0, max=0.99, step=0.01, value=0, on_change=self.draw).classes("w-48")
            self.smoothing.props('label aria-label="smoothing"')
            self.log = ui.switch("logarithmic", on_change=self.draw)
            ui.label("shift and wheel, or the box in a panel's corner, zoom").classes("quiet text-sm")
            ui.space()
            ui.button("CSV of all curves", on_click=self.download).props("outline dense no-caps")
        self.place = ui.element("div").classes("w-full curves").style(
            "display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 12px"
        )  # fmt: skip

    async def refresh(self) -> None:
        self.loaded = [await ask(_load, run) for run in self.runs]
        self.draw()

    def draw(self) -> None:
        look = Look(float(self.smoothing.value or 0), bool(self.log.value))
        for key, options in _all_charts(self.loaded, look).items():
            if key in self.charts:
                self.charts[key].options.clear()
                self.charts[key].options.update(options)
                self.charts[key].update()
            else:
                with self.place:
                    self.charts[key] = ui.echart(options).classes("w-full h-64 border rounded border-gray-500/30")

    async def download(self) -> None:
        for run in self.runs:
            found = await ask(lambda run=run: read.curves(run, read.metric_names(run), max_points=10**9))
            ui.download.content(curves_csv(found), f"{run.name}.csv", "text/csv")


def _found(root: Path, run: Run, others: Sequence[str]) -> tuple[list[Run], list[str]]:
    runs, problems = [run], []
    for name in dict.fromkeys(others):
        try:
            found = find_run(root, name)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            runs += [found] if found not in runs else []
    if len(runs) > _MAX_RUNS:
        problems.append(f"the first {_MAX_RUNS} runs are shown")
    return runs[:_MAX_RUNS], problems


def _differences(runs: Sequence[Run]) -> None:
    """The options in which the runs differ. The runs are columns by their number: a name could be anything."""
    try:
        found = read.differences(runs)
    except CheckpointError as error:
        ui.label(str(error)).classes("problem")
        return
    columns: list[dict[str, Any]] = [{"field": "key", "headerName": "option", "flex": 1}]
    columns += [{"field": f"run{place}", "headerName": run.name, "flex": 1} for place, run in enumerate(runs)]
    rows = [
        {"key": each.key, **{f"run{place}": value or "–" for place, value in enumerate(each.values)}} for each in found
    ]
    # A long list stays closed: the curves are what one came for.
    box = ui.expansion(f"{len(rows)} options in which these runs differ", value=len(rows) <= _OPEN_ROWS)
    with box.classes("w-full border rounded border-gray-500/30"):
        grid(columns, "key", rowData=rows).classes("differences")
    with ui.row().classes("gap-4"):
        for run in runs:
            ui.link(run.name, link(run.name, "curves"))


def _load(run: Run) -> _Loaded:
    names = [*_PHASES, *(name for panel in PANELS for name in panel.figures)]
    columns = [panel.spread for panel in PANELS if panel.spread]
    return _Loaded(
        name=run.name,
        curves={curve.name: curve for curve in read.curves(run, names)},
        bands={column: read.spread(run, column) for column in columns},  # pyright: ignore[reportArgumentType]
        verdicts=read.verdicts_over_steps(run),
        tokens=read.tokens_over_steps(run),
        evaluations=[each for each in read.evaluations(run) if "@" in each.figure],
        zone=overlong_zone(configuration(run)),
    )


def overlong_zone(options: Mapping[str, Any]) -> Zone | None:
    """The lengths at which a response loses reward."""
    limit = options.get("data.max_response_length")
    shaping = options.get("reward.length_shaping")
    starts = {
        "buffer": (limit or 0) - (options.get("reward.overlong_buffer.len") or 0),
        "target": options.get("reward.target_length") or 0,
    }
    if not limit or shaping not in starts:
        return None
    return Zone("overlong", starts[shaping], limit)


def _all_charts(loaded: Sequence[_Loaded], look: Look) -> dict[str, dict[str, Any]]:
    """By a key that stays the same while a run grows; in the order in which they first appear."""
    charts = {panel.title: _panel(panel, loaded, look) for panel in PANELS}
    for each in loaded:
        suffix = f" · {each.name}" if len(loaded) > 1 else ""
        phases = {label: each.curves[name] for name, label in _PHASES.items() if name in each.curves}
        if phases:
            steps = max((curve.steps for curve in phases.values()), key=len)
            parts = {label: np.interp(steps, curve.steps, curve.values) for label, curve in phases.items()}
            charts[f"phases {each.name}"] = stacked_chart(f"Time per step{suffix}", "seconds", steps, parts)
        verdicts = stacked_chart(
            f"Groups by verdict{suffix}", "groups sampled per step", each.verdicts.steps, _kept_first(each.verdicts)
        )
        spent = {name: values for name, values in _trained_first(each.tokens).items() if name not in read.TOKENS_IN}
        tokens = stacked_chart(
            f"Where tokens went{suffix}", "response tokens per step; what is not trained is waste",
            each.tokens.steps, spent,
        )  # fmt: skip
        charts |= {f"verdicts {each.name}": verdicts, f"tokens {each.name}": tokens}
    for dataset in sorted({found.dataset for each in loaded for found in each.evaluations}):
        charts[f"evaluation {dataset}"] = _evaluation(dataset, loaded, look)
    return {key: options for key, options in charts.items() if options["series"]}


def _panel(panel: Panel, loaded: Sequence[_Loaded], look: Look) -> dict[str, Any]:
    lines: list[Line] = []
    for run, each in enumerate(loaded):
        for place, (name, label) in enumerate(panel.figures.items()):
            if name not in each.curves:
                continue
            curve = each.curves[name]
            color, dash = color_of(run, place, len(loaded))
            band = each.bands.get(panel.spread or "") if place == 0 else None
            bounds = {} if band is None else {
                "low": band.quantiles[0], "high": band.quantiles[-1], "band_steps": band.steps
            }  # fmt: skip
            lines.append(Line(_label(each, label, loaded), curve.steps, curve.values, color, dash, **bounds))
    zone = loaded[0].zone if loaded and panel.spread == "length" else None
    return line_chart(panel.title, panel.unit, lines, look, zone)


def _evaluation(dataset: str, loaded: Sequence[_Loaded], look: Look) -> dict[str, Any]:
    lines: list[Line] = []
    for run, each in enumerate(loaded):
        for place, found in enumerate(_told(each.evaluations, dataset)):
            color, dash = color_of(run, place, len(loaded))
            name = _label(each, found.figure, loaded)
            lines.append(Line(name, found.steps, found.values, color, dash, found.low, found.high))
    # Few points, each with an interval of its own: a smoothed curve would leave its band.
    chart = line_chart(f"Evaluation: {dataset}", "share; shaded: 95 % interval", lines, Look(is_log=look.is_log))
    for series in chart["series"]:
        series["showSymbol"] = series["name"] in chart["legend"]["data"]
    return chart


def _told(evaluations: Sequence[read.EvalCurve], dataset: str) -> list[read.EvalCurve]:
    """One sample passes as often as samples are right on average: pass@1 would lie on avg@k."""
    found = [each for each in evaluations if each.dataset == dataset]
    has_mean = any(each.figure.startswith("avg@") for each in found)
    return [each for each in found if not (has_mean and each.figure == "pass@1")]


def _label(each: _Loaded, label: str, loaded: Sequence[_Loaded]) -> str:
    return label if len(loaded) == 1 else f"{each.name}: {label}"


def _kept_first(parts: read.Parts) -> dict[str, np.ndarray]:
    return dict(sorted(parts.parts.items(), key=lambda item: (item[0] != "kept", item[0])))


def _trained_first(parts: read.Parts) -> dict[str, np.ndarray]:
    return dict(sorted(parts.parts.items(), key=lambda item: (item[0] != "trained", item[0])))
