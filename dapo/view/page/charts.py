"""Curves as options of ECharts: plain dictionaries, so that a chart can be looked at without a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PALETTE = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899", "#84cc16", "#64748b")
_DASHES = ("solid", "dashed", "dotted")
_GREY, _FAINT = "#8a8f98", "rgba(128,128,128,0.22)"  # readable on white and on black
_HELPER = "\u200b"  # begins the names of series that are drawn but not listed

# Names come from runs, so they are escaped; helper series have no number worth reading.
_TOOLTIP = (
    """params => {
  const text = value => String(value).replace(/[&<>"']/g, c => '&#' + c.charCodeAt(0) + ';');
  const shown = value => { const size = Math.abs(value);
    return size === 0 ? '0' : size >= 1e5 || size < 1e-3 ? value.toExponential(2)
      : Number(value.toPrecision(4)).toLocaleString('en-US', {maximumFractionDigits: 6}); };
  const rows = params.filter(p => !p.seriesName.startsWith('"""
    + _HELPER
    + """') && p.value[1] != null)
    .map(p => '<tr><td>' + p.marker + text(p.seriesName) + '</td><td style="text-align:right;padding-left:12px">'
      + shown(p.value[1]) + '</td></tr>');
  return 'step ' + text(params[0].value[0]) + '<table>' + rows.join('') + '</table>';
}"""
)
_TICK = (
    "value => { const size = Math.abs(value); return size === 0 ? '0'"
    " : size >= 1e6 ? +(value / 1e6).toPrecision(3) + 'M'"
    " : size >= 1e3 ? +(value / 1e3).toPrecision(3) + 'k' : size < 1e-3 ? value.toExponential(1).replace('.0e', 'e')"
    " : String(+value.toPrecision(3)); }"
)


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
    """With one run each figure has a colour; with several each run has one, and figures differ in their dashes."""
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
            raw = _series(_HELPER + line.name, line.steps, line.values, line.color, look.is_log)
            series.append({**raw, "silent": True, "lineStyle": {"width": 1, "opacity": 0.3}})
        values = smoothed(line.values, look.smoothing)
        drawn = _series(line.name, line.steps, values, line.color, look.is_log)
        series.append({**drawn, "lineStyle": {"width": 2, "type": line.dash}})
    if zone is not None and series:
        series[-1]["markArea"] = _zone(zone)
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
    name = f"{_HELPER}band {line.name}"
    bottom = {**_series(name, steps, low, line.color, False), **base, "showSymbol": False}
    top = {**_series(name, steps, high - low, line.color, False), **base, "showSymbol": False}
    return [bottom, {**top, "areaStyle": {"opacity": 0.15, "color": line.color}}]


def _zone(zone: Zone) -> dict[str, Any]:
    label = {"show": True, "position": "insideTopLeft", "color": _GREY, "fontSize": 11}
    start = {"name": zone.name, "yAxis": zone.low, "label": label}
    return {"silent": True, "itemStyle": {"color": "rgba(239,68,68,0.12)"}, "data": [[start, {"yAxis": zone.high}]]}


def _chart(title: str, unit: str, names: list[str], series: list[dict[str, Any]], is_log: bool) -> dict[str, Any]:
    axis = {
        "axisLabel": {"color": _GREY, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": _GREY}},
        "splitLine": {"lineStyle": {"color": _FAINT}},
    }
    heading = {"fontSize": 14, "lineHeight": 18, "fontWeight": 600, "color": _GREY}
    return {
        "backgroundColor": "transparent",
        "title": {"text": title, "subtext": unit, "itemGap": 4, "left": 8, "top": 4, "textStyle": heading,
                  "subtextStyle": {"color": _GREY, "fontSize": 11, "lineHeight": 14}},
        "legend": {"show": len(names) > 1, "type": "scroll", "bottom": 2, "data": names,
                   "itemWidth": 28, "itemHeight": 8, "textStyle": {"color": _GREY}, "pageTextStyle": {"color": _GREY},
                   "pageIconColor": _GREY},
        "grid": {"left": 12, "right": 18, "top": 62, "bottom": 34 if len(names) > 1 else 12, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, ":formatter": _TOOLTIP, "backgroundColor": "rgba(30,34,42,.93)",
                    "borderWidth": 0, "textStyle": {"color": "#fff", "fontSize": 12}},
        "toolbox": {"right": 8, "top": 2, "itemSize": 13, "iconStyle": {"borderColor": _GREY},
                    "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {},
                                "saveAsImage": {"name": title, "pixelRatio": 2}}},
        # With the shift key, because the wheel alone scrolls the page.
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "shift", "moveOnMouseMove": False}],
        "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", "minInterval": 1, **axis,
                  "axisLine": {"onZero": False, "lineStyle": {"color": _GREY}}, "splitLine": {"show": False}},
        "yAxis": {"type": "log" if is_log else "value", "scale": True, **axis,
                  "axisLabel": {"color": _GREY, ":formatter": _TICK}},
        "series": series,
    }  # fmt: skip
