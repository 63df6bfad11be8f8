"""Curves as options of ECharts: plain dictionaries, so that a chart can be looked at without a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.view.page.scripts import LOW, RAW, SAVE_CSV, SAVE_SVG, TICK, TOOLTIP, WIDTH

PALETTE = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899", "#84cc16", "#64748b")
_DASHES = ("solid", "dashed", "dotted")
_GREY, _FAINT = "#8a8f98", "rgba(128,128,128,0.22)"  # readable on white and on black
# Drawn on a square of 24: two handles and a curve between them, and a table.
_SVG_ICON = "path://M2 16h6v6h-6zM16 2h6v6h-6zM5 16C5 6 8 5 16 5"
_CSV_ICON = "path://M2 3h20v18h-20zM2 9h20M2 15h20M9 3v18"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One curve of a panel; with bounds it has a band around it."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    color: str
    dash: str = "solid"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    band_steps: np.ndarray | None = None  # where the bounds have steps of their own


@dataclass(frozen=True, slots=True)
class Look:
    """What a person chose for all panels."""

    smoothing: float = 0.0  # share of the past in each smoothed value
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Zone:
    """A stretch of the y axis that means something."""

    name: str
    low: float
    high: float


def color_of(run: int, figure: int, runs: int) -> tuple[str, str]:
    """With one run each figure has a color; with several each run has one, and figures differ in their dashes."""
    if runs == 1:
        return PALETTE[figure % len(PALETTE)], "solid"
    return PALETTE[run % len(PALETTE)], _DASHES[figure % len(_DASHES)]


def smoothed(values: np.ndarray, share: float) -> np.ndarray:
    """An exponential mean that starts without a bias towards zero, and does not see what is not a number."""
    if share <= 0:
        return values
    means, total, weight = np.full(len(values), np.nan), 0.0, 0.0
    for place, value in enumerate(values):
        if np.isfinite(value):
            total, weight = share * total + (1 - share) * value, share * weight + (1 - share)
        if weight:
            means[place] = total / weight
    return means


def line_chart(title: str, unit: str, lines: Sequence[Line], look: Look, zone: Zone | None = None) -> dict[str, Any]:
    series: list[dict[str, Any]] = []
    for line in lines:
        # A stack on a logarithmic axis is not the sum that a reader expects.
        if line.low is not None and line.high is not None and not look.is_log:
            series += _band(line, line.low, line.high)
        if look.smoothing > 0:
            raw = _series(RAW + line.name, line.steps, line.values, line.color, look.is_log)
            series.append({**raw, "silent": True, "lineStyle": {"width": 1, "opacity": 0.3}})
        values = smoothed(line.values, look.smoothing)
        drawn = _series(line.name, line.steps, values, line.color, look.is_log)
        series.append({**drawn, "lineStyle": {"width": 2, "type": line.dash}})
    if zone is not None and series:
        series[-1]["markArea"] = _zone(zone)
        unit += f"; red: {zone.name}"  # a word inside the panel would lie on a curve
    return _chart(title, unit, [line.name for line in lines], series, look.is_log)


def stacked_chart(title: str, unit: str, steps: np.ndarray, parts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Parts of a whole, one on the other; those that are zero throughout are left out."""
    kept = {name: values for name, values in parts.items() if np.any(np.nan_to_num(values))}
    series = [
        {
            **_series(name, steps, np.nan_to_num(values), PALETTE[place % len(PALETTE)], False),
            "stack": "all",
            "lineStyle": {"width": 0},
            "areaStyle": {"opacity": 0.75},
        }
        for place, (name, values) in enumerate(kept.items())
    ]
    chart = _chart(title, unit, list(kept), series, False)
    chart["yAxis"]["scale"] = False  # the parts of a whole are compared by their heights, from zero on
    chart["legend"] |= {"icon": "roundRect", "itemWidth": 14}  # there are no lines to show
    return chart


def points(steps: np.ndarray, values: np.ndarray, is_log: bool = False) -> list[list[float | None]]:
    """What is not a number, or has no logarithm, is a gap."""
    good = np.isfinite(values) & ((values > 0) | (not is_log))
    return [[int(x), float(y) if fine else None] for x, y, fine in zip(steps, values, good, strict=True)]


def _series(name: str, steps: np.ndarray, values: np.ndarray, color: str, is_log: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "data": points(steps, values, is_log),
        # A curve of one point has no line to be seen by.
        "showSymbol": len(steps) < 3,
        "symbolSize": 5,
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        "animation": False,
    }


def _band(line: Line, low: np.ndarray, high: np.ndarray) -> list[dict[str, Any]]:
    """The lower bound, unseen, and on it an area as high as the band."""
    steps = line.steps if line.band_steps is None else line.band_steps
    base = {"stack": f"band {line.name}", "stackStrategy": "all", "silent": True, "lineStyle": {"width": 0}}
    bottom = {**_series(LOW + line.name, steps, low, line.color, False), **base, "showSymbol": False}
    top = {**_series(WIDTH + line.name, steps, high - low, line.color, False), **base, "showSymbol": False}
    return [bottom, {**top, "areaStyle": {"opacity": 0.15, "color": line.color}}]


def _zone(zone: Zone) -> dict[str, Any]:
    ends = [{"yAxis": zone.low}, {"yAxis": zone.high}]
    return {"silent": True, "itemStyle": {"color": "rgba(239,68,68,0.12)"}, "data": [ends]}


def _chart(title: str, unit: str, names: list[str], series: list[dict[str, Any]], is_log: bool) -> dict[str, Any]:
    axis = {
        "axisLabel": {"color": _GREY, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": _GREY}},
        "splitLine": {"lineStyle": {"color": _FAINT}},
    }
    steps = {point[0] for each in series for point in each["data"]}
    # Where there is one step only, ECharts would make up a strange stretch before it.
    first, last = (min(steps) - 1, max(steps) + 1) if len(steps) == 1 else ("dataMin", "dataMax")
    # The toolbox stands to the right of the title.
    fits = {"width": 260, "overflow": "truncate"}
    heading = {"fontSize": 14, "lineHeight": 18, "fontWeight": 600, "color": _GREY, **fits}
    return {
        "backgroundColor": "transparent",
        "title": {"text": title, "subtext": unit, "itemGap": 4, "left": 8, "top": 4, "textStyle": heading,
                  "subtextStyle": {"color": _GREY, "fontSize": 11, "lineHeight": 14}},
        "legend": {"show": len(names) > 1, "type": "scroll", "bottom": 2, "data": names,
                   "itemWidth": 28, "itemHeight": 8, "textStyle": {"color": _GREY}, "pageTextStyle": {"color": _GREY},
                   "pageIconColor": _GREY},
        "grid": {"left": 12, "right": 44, "top": 62, "bottom": 34 if len(names) > 1 else 12, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, ":formatter": TOOLTIP, "backgroundColor": "rgba(30,34,42,.93)",
                    "borderWidth": 0, "textStyle": {"color": "#fff", "fontSize": 12}},
        "toolbox": {"right": 8, "top": 2, "padding": 5, "itemSize": 13, "itemGap": 10,
                    "iconStyle": {"borderColor": _GREY},
                    "emphasis": {"iconStyle": {"borderColor": PALETTE[0], "textFill": PALETTE[0]}},
                    "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {},
                                "saveAsImage": {"name": title, "title": "PNG", "pixelRatio": 2},
                                "mySvg": {"title": "SVG", "icon": _SVG_ICON, ":onclick": SAVE_SVG},
                                "myCsv": {"title": "CSV", "icon": _CSV_ICON, ":onclick": SAVE_CSV}}},
        # With the shift key, because the wheel alone scrolls the page.
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "shift", "moveOnMouseMove": False}],
        "xAxis": {"type": "value", "name": "step", "nameGap": 8, "nameTextStyle": {"color": _GREY},
                  "min": first, "max": last, "minInterval": 1, **axis,
                  "axisLabel": {"color": _GREY, "hideOverlap": True, "margin": 10}, "splitLine": {"show": False},
                  "axisLine": {"onZero": False, "lineStyle": {"color": _GREY}}},
        "yAxis": {"type": "log" if is_log else "value", "scale": True, **axis,
                  "axisLabel": {"color": _GREY, ":formatter": TICK}},
        "series": series,
    }  # fmt: skip
