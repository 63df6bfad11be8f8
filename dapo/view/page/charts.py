"""Build ECharts options from curves: plain dictionaries, which tests can inspect without a browser.

A key with a leading colon holds JavaScript; its functions are in page.js.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PALETTE = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899", "#84cc16", "#64748b")
_DASHES = ("solid", "dashed", "dotted")
_GRAY, _FAINT = "#8a8f98", "rgba(128,128,128,0.22)"  # readable on white and on black
# On a 24 x 24 grid: two handles with a curve between them, and a table.
_SVG_ICON = "path://M2 16h6v6h-6zM16 2h6v6h-6zM5 16C5 6 8 5 16 5"
_CSV_ICON = "path://M2 3h20v18h-20zM2 9h20M2 15h20M9 3v18"

# Series that are drawn but not listed, each followed by the name of the main series. page.js knows these prefixes.
_RAW, _LOW, _WIDTH, _ALONE = "\u200braw ", "\u200blow ", "\u200bwidth ", "\u200balone "


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One curve of a panel. If it has bounds, a band is drawn around it."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    color: str
    dash: str = "solid"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    band_steps: np.ndarray | None = None  # steps of the bounds, if they differ from those of the curve


@dataclass(frozen=True, slots=True)
class Look:
    """Display options that apply to all panels."""

    smoothing: float = 0.0  # weight of the past in each smoothed value, 0 to 1
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Zone:
    """A named interval of the y axis, drawn shaded."""

    name: str
    low: float
    high: float


def color_of(run: int, metric: int, runs: int) -> tuple[str, str]:
    """Return color and dash: a color per metric if there is one run, else a color per run and a dash per metric."""
    if runs == 1:
        return PALETTE[metric % len(PALETTE)], "solid"
    return PALETTE[run % len(PALETTE)], _DASHES[metric % len(_DASHES)]


def smoothed(values: np.ndarray, decay: float) -> np.ndarray:
    """Return the exponential moving average, with bias correction, skipping values that are not finite."""
    if decay <= 0:
        return values
    means, total, weight = np.full(len(values), np.nan), 0.0, 0.0
    for index, value in enumerate(values):
        if np.isfinite(value):
            total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        if weight:
            means[index] = total / weight
    return means


def line_chart(
    title: str, unit: str, lines: Sequence[Line], look: Look, zone: Zone | None = None, axis: str = "step"
) -> dict[str, Any]:
    """Return a chart of lines over steps, or over what `axis` names."""
    series: list[dict[str, Any]] = []
    for line in lines:
        # A band is two stacked series, which a logarithmic axis would draw at the wrong height.
        if line.low is not None and line.high is not None and not look.is_log:
            series += _band(line, line.low, line.high)
        if look.smoothing > 0:
            raw = _series(_RAW + line.name, line.steps, line.values, line.color, look.is_log)
            series.append({**raw, "silent": True, "lineStyle": {"width": 1, "opacity": 0.3}})
        values = smoothed(line.values, look.smoothing)
        drawn = _series(line.name, line.steps, values, line.color, look.is_log)
        series.append({**drawn, "lineStyle": {"width": 2, "type": line.dash}})
        alone = _alone(line.values, look.is_log)
        if alone.any():
            dots = _series(_ALONE + line.name, line.steps[alone], line.values[alone], line.color, look.is_log)
            style = {"color": line.color, "opacity": 0.3 if look.smoothing > 0 else 1}
            dots |= {"silent": True, "showSymbol": True, "itemStyle": style, "lineStyle": {"width": 0}}
            series.append(dots)
    if zone is not None and series:
        area = [[{"yAxis": zone.low}, {"yAxis": zone.high}]]
        series[-1]["markArea"] = {"silent": True, "itemStyle": {"color": "rgba(239,68,68,0.12)"}, "data": area}
        unit += f"; red: {zone.name}"  # in the subtitle, because a label inside the panel would cover a curve
    chart = _chart(title, unit, [line.name for line in lines], series, look.is_log)
    chart["xAxis"] |= {"id": axis, "name": axis}
    return chart


def stacked_chart(
    title: str, unit: str, steps: np.ndarray, parts: Mapping[str, np.ndarray], colors: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a stacked area chart. Parts that are zero throughout are left out."""
    colors = colors or {}
    kept = {name: values for name, values in parts.items() if np.any(np.nan_to_num(values))}
    area = {"stack": "all", "lineStyle": {"width": 0}, "areaStyle": {"opacity": 0.75}}
    series = [
        {**_series(name, steps, np.nan_to_num(values), colors.get(name, PALETTE[index % len(PALETTE)])), **area}
        for index, (name, values) in enumerate(kept.items())
    ]
    chart = _chart(title, unit, list(kept), series, False)
    chart["yAxis"]["scale"] = False  # start at zero, because the heights of the parts are compared
    chart["legend"] |= {"icon": "roundRect", "itemWidth": 14}  # areas have no line to show in the legend
    return chart


def points(steps: np.ndarray, values: np.ndarray, is_log: bool = False) -> list[list[float | None]]:
    """Return [step, value] pairs. A value that is not finite, or has no logarithm, becomes a gap (None)."""
    good = _can_draw(values, is_log)
    return [[x, float(y) if fine else None] for x, y, fine in zip(steps.tolist(), values, good, strict=True)]


def _can_draw(values: np.ndarray, is_log: bool) -> np.ndarray:
    return np.isfinite(values) & ((values > 0) | (not is_log))


def _alone(values: np.ndarray, is_log: bool) -> np.ndarray:
    """Return which values are between two gaps, so that no line shows them."""
    good = np.pad(_can_draw(values, is_log), 1)
    return good[1:-1] & ~good[:-2] & ~good[2:]


def _series(name: str, steps: np.ndarray, values: np.ndarray, color: str, is_log: bool = False) -> dict[str, Any]:
    return {
        "name": name, "type": "line", "data": points(steps, values, is_log), "symbolSize": 5,
        "showSymbol": len(steps) < 3,  # a curve of one point has no visible line
        "itemStyle": {"color": color}, "emphasis": {"disabled": True}, "animation": False,
    }  # fmt: skip


def _band(line: Line, low: np.ndarray, high: np.ndarray) -> list[dict[str, Any]]:
    """Return two stacked series: the invisible lower bound, and on top of it an area as high as the band."""
    steps = line.steps if line.band_steps is None else line.band_steps
    base = {"stack": f"band {line.name}", "stackStrategy": "all", "silent": True, "lineStyle": {"width": 0}}
    base |= {"showSymbol": False}
    return [
        {**_series(_LOW + line.name, steps, low, line.color), **base},
        {
            **_series(_WIDTH + line.name, steps, high - low, line.color),
            **base,
            "areaStyle": {"opacity": 0.15, "color": line.color},
        },
    ]


def _chart(title: str, unit: str, names: list[str], series: list[dict[str, Any]], is_log: bool) -> dict[str, Any]:
    axis = {
        "axisLabel": {"color": _GRAY, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": _GRAY}},
        "splitLine": {"lineStyle": {"color": _FAINT}},
    }
    steps = {point[0] for each in series for point in each["data"]}
    # With a single step ECharts would choose an odd range, so center the step.
    first, last = (min(steps) - 1, max(steps) + 1) if len(steps) == 1 else ("dataMin", "dataMax")
    # Leave room for the toolbox to the right of the title.
    fits = {"width": 260, "overflow": "truncate"}
    heading = {"fontSize": 14, "lineHeight": 18, "fontWeight": 600, "color": _GRAY, **fits}
    return {
        "backgroundColor": "transparent",
        "title": {"text": title, "subtext": unit, "itemGap": 4, "left": 8, "top": 4, "textStyle": heading,
                  "subtextStyle": {"color": _GRAY, "fontSize": 11, "lineHeight": 14}},
        "legend": {"show": len(names) > 1, "type": "scroll", "bottom": 2, "data": names,
                   "itemWidth": 28, "itemHeight": 8, "textStyle": {"color": _GRAY}, "pageTextStyle": {"color": _GRAY},
                   "pageIconColor": _GRAY},
        "grid": {"left": 12, "right": 44, "top": 62, "bottom": 34 if len(names) > 1 else 12, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, ":formatter": "dapo.tooltip", "borderWidth": 0,
                    "backgroundColor": "rgba(30,34,42,.93)", "textStyle": {"color": "#fff", "fontSize": 12}},
        "toolbox": {"right": 8, "top": 2, "padding": 5, "itemSize": 13, "itemGap": 10,
                    "iconStyle": {"borderColor": _GRAY},
                    "emphasis": {"iconStyle": {"borderColor": PALETTE[0], "textFill": PALETTE[0]}},
                    "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {},
                                "saveAsImage": {"name": title, "title": "PNG", "pixelRatio": 2},
                                "mySvg": {"title": "SVG", "icon": _SVG_ICON, ":onclick": "dapo.saveSvg"},
                                "myCsv": {"title": "CSV", "icon": _CSV_ICON, ":onclick": "dapo.saveCsv"}}},
        # Zoom needs the shift key, because the wheel alone scrolls the page.
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "shift", "moveOnMouseMove": False}],
        "xAxis": {"type": "value", "id": "step", "name": "step", "nameGap": 8, "nameTextStyle": {"color": _GRAY},
                  "min": first, "max": last, "minInterval": 1, **axis,
                  "axisLabel": {"color": _GRAY, "hideOverlap": True, "margin": 10}, "splitLine": {"show": False},
                  "axisLine": {"onZero": False, "lineStyle": {"color": _GRAY}}},
        "yAxis": {"type": "log" if is_log else "value", "scale": True, **axis,
                  "axisLabel": {"color": _GRAY, ":formatter": "dapo.tick"}},
        "series": series,
    }  # fmt: skip
