"""Build the panels of the curves view, of one run or several runs overlaid, as ECharts options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.types import Verdict
from dapo.view import curves as read
from dapo.view.page.charts import PALETTE, Line, Look, Zone, color_of, line_chart, stacked_chart
from dapo.view.page.text import as_words
from dapo.view.source import Run, configuration, number_option

POINTS = 400  # per curve: a panel is hardly wider in pixels, and with more points a browser takes seconds per dozen


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that are drawn together."""

    title: str
    unit: str
    metrics: Mapping[str, str]  # metric name -> label
    spread: str | None = None  # per-response column whose 10 to 90% range is shaded around the first metric


PANELS = (
    Panel("Reward", "mean over responses; shaded: 10 to 90%", {"reward/mean": "reward"}, "reward"),
    Panel("Accuracy", "share of correct responses", {"acc/mean": "accuracy"}),
    Panel(
        "Response length",
        "tokens; shaded: 10 to 90%",
        {"response_length/mean": "mean", "response_length/max": "longest", "thought_length/mean": "thought"},
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
_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _YELLOW, _CYAN, _PINK, _LIME, _SLATE = PALETTE
# What occurs in several charts has one color in all of them.
_COLORS = {
    "reward": _BLUE, "generated": _ORANGE, "generate": _ORANGE, "trained": _GREEN, "train": _GREEN,
    "kept": _GREEN, "padded": _LIME, "masked": "#a18072", "carried": _PURPLE, "carried out": _PURPLE, "stale": _SLATE,
    "surplus": _PINK, "all right": _CYAN, "all wrong": _RED, "no variance": _YELLOW, "unjudged": _ORANGE,
    "nothing to train": _BLUE,
}  # fmt: skip
_OWN_COLORS = (_YELLOW, _CYAN, _RED, _PINK, _LIME)  # of the reasons of a user's filter, which replace the flat ones
_DROPPED = "dropped/"
_PHASES = {"timing_s/generate": "generate", "timing_s/reward": "reward", "timing_s/train": "train"}


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Everything that the panels of one run need, read once per step."""

    name: str
    curves: Mapping[str, read.Curve]
    bands: Mapping[str, read.Band]
    verdicts: read.Parts
    tokens: read.Parts
    evaluations: Sequence[read.EvalCurve]
    zone: Zone | None


def load(run: Run, chosen: Sequence[str] = ()) -> Loaded:
    """Read the metrics of the panels, and the additional metrics that the user chose."""
    names = dict.fromkeys([*(name for panel in PANELS for name in panel.metrics), *chosen])
    found = read.curves(run, names, POINTS, with_gaps=True) + read.curves(run, _PHASES, POINTS)
    columns = [panel.spread for panel in PANELS if panel.spread]
    return Loaded(
        name=run.name,
        curves={curve.name: curve for curve in found},
        bands={column: read.spread(run, column) for column in columns},  # pyright: ignore[reportArgumentType]
        verdicts=read.verdicts_over_steps(run, POINTS),
        tokens=read.tokens_over_steps(run, POINTS),
        evaluations=_drawn(read.evaluations(run)),
        zone=overlong_zone(configuration(run)),
    )


def overlong_zone(options: Mapping[str, Any]) -> Zone | None:
    """Return the response lengths at which reward is lost, or None without length shaping."""
    limit = number_option(options, "data.max_response_length")
    shaping = options.get("reward.length_shaping")
    starts = {
        "buffer": (limit or 0) - (number_option(options, "reward.overlong_buffer.len") or 0),
        "target": number_option(options, "reward.target_length") or 0,
    }
    if not limit or not isinstance(shaping, str) or shaping not in starts:
        return None
    return Zone("overlong", starts[shaping], limit)


def all_charts(loaded: Sequence[Loaded], look: Look, chosen: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return all charts in display order. Their keys stay the same while a run grows."""
    charts = {f"chosen {name}": _panel(Panel(name, "value per step", {name: name}), loaded, look) for name in chosen}
    charts |= {panel.title: _panel(panel, loaded, look) for panel in PANELS}
    colors = _colors(loaded)
    for each in loaded:
        suffix = f" · {each.name}" if len(loaded) > 1 else ""
        phases = {label: each.curves[name] for name, label in _PHASES.items() if name in each.curves}
        if phases:
            steps = max((curve.steps for curve in phases.values()), key=len)
            parts = {label: np.interp(steps, curve.steps, curve.values) for label, curve in phases.items()}
            charts[f"phases {each.name}"] = stacked_chart(f"Time per step{suffix}", "seconds", steps, parts, colors)
        verdicts = stacked_chart(
            f"Groups by verdict{suffix}", "groups sampled per step", each.verdicts.steps,
            _first(each.verdicts.parts, Verdict.KEPT), colors,
        )  # fmt: skip
        spent = {name: values for name, values in each.tokens.parts.items() if name not in read.TOKENS_IN}
        tokens = stacked_chart(
            f"Where tokens went{suffix}", "response tokens per step; all but trained and carried out is waste",
            each.tokens.steps, _first(spent, "trained"), colors,
        )  # fmt: skip
        charts |= {f"verdicts {each.name}": verdicts, f"tokens {each.name}": tokens}
    for dataset in sorted({found.dataset for each in loaded for found in each.evaluations}):
        charts[f"evaluation {dataset}"] = _evaluation(dataset, loaded, look)
    return {key: options for key, options in charts.items() if options["series"]}


def _panel(panel: Panel, loaded: Sequence[Loaded], look: Look) -> dict[str, Any]:
    lines: list[Line] = []
    for run, each in enumerate(loaded):
        for index, (name, label) in enumerate(panel.metrics.items()):
            if name not in each.curves:
                continue
            curve = each.curves[name]
            color, dash = color_of(run, index, len(loaded))
            color = _COLORS.get(label, color) if len(loaded) == 1 else color
            band = each.bands.get(panel.spread or "") if index == 0 else None
            bounds = {} if band is None else {
                "low": band.quantiles[0], "high": band.quantiles[-1], "band_steps": band.steps
            }  # fmt: skip
            lines.append(Line(_label(each, label, loaded), curve.steps, curve.values, color, dash, **bounds))
    zone = loaded[0].zone if loaded and panel.spread == "length" else None
    return line_chart(panel.title, panel.unit, lines, look, zone)


def _evaluation(dataset: str, loaded: Sequence[Loaded], look: Look) -> dict[str, Any]:
    lines: list[Line] = []
    for run, each in enumerate(loaded):
        for index, found in enumerate(found for found in each.evaluations if found.dataset == dataset):
            color, dash = color_of(run, index, len(loaded))
            name = _label(each, found.metric, loaded)
            lines.append(Line(name, found.steps, found.values, color, dash, found.low, found.high))
    is_share = any("@" in found.metric for each in loaded for found in each.evaluations if found.dataset == dataset)
    unit = f"{'share of correct responses' if is_share else 'mean reward'}; shaded: 95% interval"
    # Not smoothed: evaluations are few, each with its own interval, and a smoothed curve would leave the band.
    chart = line_chart(f"Evaluation: {dataset}", unit, lines, Look(is_log=look.is_log))
    for series in chart["series"]:
        series["showSymbol"] = series["name"] in chart["legend"]["data"]
    return chart


def _drawn(evaluations: Sequence[read.EvalCurve]) -> list[read.EvalCurve]:
    """Select avg@k, pass@k and maj@k of each set, or the mean reward of a set that has no accuracy."""
    has_accuracy = {each.dataset for each in evaluations if each.metric.startswith("avg@")}

    def is_drawn(each: read.EvalCurve) -> bool:
        if each.dataset not in has_accuracy:
            return each.metric == "reward/mean"
        # pass@1 equals avg@k, so its curve would cover that one.
        return "@" in each.metric and each.metric != "pass@1"

    return [each for each in evaluations if is_drawn(each)]


def _label(each: Loaded, label: str, loaded: Sequence[Loaded]) -> str:
    return label if len(loaded) == 1 else f"{each.name}: {label}"


def _first(parts: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return the parts with `name` first, which puts it at the bottom of the stack, and the others sorted."""
    found: dict[str, np.ndarray] = {}
    for part, values in sorted(parts.items(), key=lambda item: (item[0] != name, item[0])):
        label = as_words(part.replace(_DROPPED, "dropped: ", 1))
        found[label] = found.get(label, 0) + values
    return found


def _colors(loaded: Sequence[Loaded]) -> dict[str, str]:
    """Return the color of each part of the stacked charts: a dropped group's tokens have that of its verdict."""
    verdicts = {name for each in loaded for name in each.verdicts.parts}
    verdicts |= {
        name.removeprefix(_DROPPED) for each in loaded for name in each.tokens.parts if name.startswith(_DROPPED)
    }
    own = sorted(set(map(as_words, verdicts)) - _COLORS.keys())
    colors = _COLORS | {name: _OWN_COLORS[index % len(_OWN_COLORS)] for index, name in enumerate(own)}
    return colors | {f"dropped: {name}": color for name, color in colors.items()}
