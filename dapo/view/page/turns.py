"""An episode as a conversation: turns of the model, and what the environment gave, marked as not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from dapo.view.page.text import display_text, format_number

_MOST = 100  # turns shown
_SCROLLS = "model-text overflow-auto w-full max-h-96"


def show_turns(turns: Sequence[Mapping[str, Any]]) -> None:
    for number, turn in enumerate(turns[:_MOST], start=1):
        ui.label(f"model, turn {number}").classes("quiet text-xs")
        ui.label(display_text(turn["text"])).classes(_SCROLLS)
        _show_given(turn)
    if len(turns) > _MOST:
        ui.label(f"… {len(turns) - _MOST:,} more turns").classes("quiet text-xs")


def _show_given(turn: Mapping[str, Any]) -> None:
    """Show calls with their results, or the messages if no tool was called, and how long the environment took."""
    calls: Sequence[Mapping[str, Any]] = turn["calls"]
    with ui.column().classes("given gap-1 w-full"):
        for call in calls:
            state = "failed after" if call.get("error") else "took"
            name = display_text(str(call.get("name", "")), 100) or "malformed call"
            ui.label(f"{name}, {state} {_seconds(call)}").classes("quiet text-xs" + " error" * bool(call.get("error")))
            ui.label(display_text(str(call.get("arguments", "")))).classes(_SCROLLS)
            ui.label(f"→ {display_text(str(call.get('result', '')))}").classes(_SCROLLS)
        for message in turn["messages"]:
            if not calls or message.get("role") != "tool":
                ui.label(display_text(str(message.get("role", "")), 100)).classes("quiet text-xs")
                ui.label(display_text(str(message.get("content", "")))).classes(_SCROLLS)
        ui.label(f"the environment took {_seconds(turn)}").classes("quiet text-xs")


def _seconds(entry: Mapping[str, Any]) -> str:
    seconds = entry.get("seconds")
    return f"{format_number(seconds if isinstance(seconds, int | float) else None)} s"
