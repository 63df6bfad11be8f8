"""The tokens view: one response, each token colored by one of its values; clipped tokens are underlined."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from nicegui import ui

from dapo.store.encoding import visible
from dapo.types import Verdict
from dapo.view.groups import GroupFilter, group, groups
from dapo.view.page.frame import Live, ask, link
from dapo.view.page.groups import show_text
from dapo.view.page.text import format_number
from dapo.view.source import Run
from dapo.view.tokens import Decode, ResponseTokens, tokens

ColorBy = Literal["log-probability", "ratio", "entropy", "advantage"]
LIMIT = 4096  # tokens per page
_NOT_STORED = "only the text of this response was stored; run.store_tokens=all stores the tokens of every group"

_BLUE, _RED, _ORANGE, _VIOLET, _GREEN = (59, 130, 246), (239, 68, 68), (249, 115, 22), (168, 85, 247), (16, 185, 129)


@dataclass(frozen=True, slots=True)
class Scale:
    """A color scale: labels and colors of its two ends. Without `low_color` the low end is transparent."""

    low: str
    high: str
    high_color: tuple[int, int, int]
    low_color: tuple[int, int, int] | None = None


def build_newest(run: Run) -> Live:
    """Redirect to the newest response that was trained on."""
    message = ui.label("looking for a response whose tokens were stored")

    async def refresh() -> None:
        page = await ask(groups, run, GroupFilter(verdicts=(Verdict.KEPT,)), limit=1, newest_first=True)
        if page.rows:
            ui.navigate.to(link(run.name, "tokens", page.rows[0].serial, 0))
        else:
            message.set_text("no group was trained on yet; open a group, and from there the tokens of a response")

    return Live(refresh)


def build(run: Run, serial: int, sample: int, start: int, decoder: Callable[[Run], Decode]) -> Live:
    with ui.row().classes("items-center gap-4 w-full"):
        ui.label(f"Response {sample} of group {serial}").classes("text-xl")
        ui.link("the group", link(run.name, "groups", serial))
        summary = ui.label().classes("quiet")
    colors = ui.row().classes("items-center gap-4 w-full")
    with colors:
        ui.label("color by").classes("quiet")
        choice = ui.toggle(list(get_args(ColorBy)), value="log-probability").props("no-caps dense")
        legend = ui.html("", sanitize=False).props("id=token-legend")
    body = ui.html("", sanitize=False).classes("tokens w-full p-4 border rounded border-gray-500/30")
    body.on("mouseover", js_handler="dapo.showTip").on("mouseleave", js_handler="dapo.hideTip")
    ui.element("div").props("id=token-tip")
    pages = ui.row().classes("gap-4")
    text = ui.column().classes("w-full")
    found: ResponseTokens | None = None

    def draw() -> None:
        if found is not None:
            values, scale = color_values(found, choice.value)
            body.set_content(tokens_html(found, values, scale))
            legend.set_content(legend_html(scale, found.clips is not None, bool(found.given.any())))

    async def refresh() -> None:
        nonlocal found
        found = await ask(lambda: tokens(run, serial, sample, decoder(run), start, LIMIT))
        for each in (colors, body):
            each.set_visibility(found is not None)
        if found is None:
            summary.set_text(_NOT_STORED)
            responses = (await ask(group, run, serial)).responses
            text.clear()
            with text, ui.card().classes("w-full p-4 gap-2 only-text"):
                for response in responses:
                    if response.sample == sample:
                        show_text(response)
            return
        text.clear()
        summary.set_text(_summary(found))
        draw()
        pages.clear()
        with pages:
            _pages(run, serial, sample, found)

    choice.on_value_change(draw)
    return Live(refresh)


def color_values(found: ResponseTokens, color_by: ColorBy) -> tuple[np.ndarray | None, Scale]:
    """Return each token's position on the scale, from -1 to 1, or None if the value was not recorded."""
    if color_by == "log-probability":
        logprobs = found.sampler_logprobs if found.policy_logprobs is None else found.policy_logprobs
        return np.clip(-logprobs / 5, 0, 1), Scale("0 (certain)", "-5 nats", _ORANGE)
    if color_by == "advantage":
        # All tokens of a response share one advantage.
        values = None if found.advantage is None else np.full(len(found.ids), np.clip(found.advantage / 2, -1, 1))
        return values, Scale("-2", "+2", _GREEN, _RED)
    if color_by == "ratio":
        if found.ratio is None:
            return None, Scale("lower", "higher", _RED, _BLUE)
        size = max(float(np.nanmax(np.abs(np.log(found.ratio)), initial=0.0)), 1e-3)
        return np.log(found.ratio) / size, Scale(f"{np.exp(-size):.3g}", f"{np.exp(size):.3g}", _RED, _BLUE)
    if found.entropy is None:
        return None, Scale("0", "high", _VIOLET)
    largest = max(float(np.nanmax(found.entropy, initial=0.0)), 1e-6)
    return found.entropy / largest, Scale("0", f"{largest:.2f} nats", _VIOLET)


def tokens_html(found: ResponseTokens, values: np.ndarray | None, scale: Scale) -> str:
    """Return the tokens as HTML. This is the only HTML made from a model's text: every piece is escaped here."""
    parts = []
    for index, piece in enumerate(found.pieces):
        is_given = bool(found.given[index])
        style = "" if values is None or is_given else _background(float(values[index]), scale)
        clip = found.clips[index] if found.clips else None
        mark = ' class="given"' if is_given else f' class="clip-{clip}"' if clip else ""
        tip = html.escape(_tip(found, index), quote=True)
        text = html.escape(visible(piece).replace("\n", "⏎\n") or "∅")
        parts.append(f'<span{mark} style="{style}" data-tip="{tip}">{text}</span>')
    return "".join(parts)


def legend_html(scale: Scale, has_clips: bool, has_given: bool = False) -> str:
    ends = [_rgba(scale.low_color, 0.7), "transparent"] if scale.low_color else ["transparent"]
    colors = ",".join([*ends, _rgba(scale.high_color, 0.7)])
    clips = "".join(
        f'<span class="clip-{name}" style="margin-left:14px">{name} clip</span>' for name in ("low", "high", "dual")
    )
    given = '<span class="given" style="margin-left:14px">given by the environment</span>' if has_given else ""
    return (
        f'{html.escape(scale.low)} <span style="display:inline-block;width:110px;height:12px;vertical-align:middle;'
        f'background:linear-gradient(90deg,{colors})"></span> {html.escape(scale.high)}'
        + (clips if has_clips else "")
        + given
    )


def _background(value: float, scale: Scale) -> str:
    if not np.isfinite(value):
        return ""
    color = scale.high_color if value >= 0 else scale.low_color or scale.high_color
    return f"background:{_rgba(color, 0.7 * min(1.0, abs(value)))}"


def _rgba(color: tuple[int, int, int], opacity: float) -> str:
    return f"rgba({color[0]},{color[1]},{color[2]},{opacity:.2f})"


def _tip(found: ResponseTokens, index: int) -> str:
    def at(values: np.ndarray | None) -> str:
        return format_number(None if values is None else float(values[index]), 4)

    if found.given[index]:
        return f"token {found.start + index} (id {found.ids[index]})\ngiven by the environment, not trained on"
    clip = found.clips[index] if found.clips else None
    rows = [
        ("token", f"{found.start + index} (id {found.ids[index]})"),
        ("sampler log-prob", at(found.sampler_logprobs)),
        ("trainer log-prob", at(found.policy_logprobs)),
        ("ratio", at(found.ratio)),
        ("entropy", at(found.entropy)),
        ("advantage", format_number(found.advantage, 4)),
        ("weights", f"version {found.versions[index]}"),
        ("clipped", clip or ("no" if found.clips else "–")),
    ]
    width = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<18}{value:>{width}}" for name, value in rows)


def _summary(found: ResponseTokens) -> str:
    parts = [f"{found.length:,} tokens"]
    if len(found.ids) < found.length:
        parts.append(f"{found.start:,} to {found.start + len(found.ids) - 1:,} shown")
    if found.advantage is not None:
        parts.append(f"advantage {found.advantage:+.3f}")
    if found.given.any():
        parts.append(f"{int(found.given.sum()):,} of those shown given by the environment")
    if found.ratio is None:
        parts.append("not trained on, so it has no ratio and no entropy")
    elif found.clips is not None:
        parts.append(f"{sum(clip is not None for clip in found.clips):,} clipped")
    return " · ".join(parts)


def _pages(run: Run, serial: int, sample: int, found: ResponseTokens) -> None:
    here = link(run.name, "tokens", serial, sample)
    if found.start:
        ui.link("earlier tokens", f"{here}?start={max(0, found.start - LIMIT)}")
    if found.start + len(found.ids) < found.length:
        ui.link("later tokens", f"{here}?start={found.start + LIMIT}")
