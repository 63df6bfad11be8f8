"""An episode as a conversation: turns of the model, and what the environment gave, marked as not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from dapo.view.page.text import display_text, format_number

_MOST = 100  # turns shown
_NOTABLE = 0.01  # seconds
_SCROLLS = "model-text overflow-auto w-full max-h-96"


def show_turns(turns: Sequence[Mapping[str, Any]]) -> None:
    for number, turn in enumerate(turns[:_MOST], start=1):
        reward = f", reward {format_number(turn['reward'])}" if "reward" in turn else ""
        ui.label(f"model, turn {number}{reward}").classes("quiet text-xs")
        ui.label(display_text(turn["text"])).classes(_SCROLLS)
        _show_given(turn)
    if len(turns) > _MOST:
        ui.label(f"… {len(turns) - _MOST:,} more turns").classes("quiet text-xs")


def _show_given(turn: Mapping[str, Any]) -> None:
    """Show calls with their results, or the messages if no tool was called, and the time if it is notable."""
    calls: Sequence[Mapping[str, Any]] = turn["calls"]
    with ui.column().classes("given gap-1 w-full"):
        for call in calls:
            name = display_text(str(call.get("name", "")), 100) or "malformed call"
            is_failed = bool(call.get("error"))
            line = ", ".join(filter(None, [name, "failed" if is_failed else "", _time(call)]))
            ui.label(line).classes("quiet text-xs" + " error" * is_failed)
            ui.label(display_text(str(call.get("arguments", "")))).classes(_SCROLLS)
            ui.label(f"→ {display_text(str(call.get('result', '')))}").classes(_SCROLLS)
        for message in turn["messages"]:
            if not calls or message.get("role") != "tool":
                ui.label(display_text(str(message.get("role", "")), 100)).classes("quiet text-xs")
                ui.label(display_text(str(message.get("content", "")))).classes(_SCROLLS)
        if time := _time(turn):
            ui.label(f"the environment {time}").classes("quiet text-xs")


def _time(entry: Mapping[str, Any]) -> str:
    """Return how long a reply or call took; nothing if that was too short to matter."""
    seconds = entry.get("seconds")
    if not isinstance(seconds, int | float) or seconds < _NOTABLE:
        return ""
    return f"took {format_number(seconds)} s"
