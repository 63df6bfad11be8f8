"""Format text and numbers for display. Text of models and datasets is shortened, and control characters are named."""

from __future__ import annotations

import time

from dapo.store.encoding import visible

MAX_CHARACTERS = 20_000


def display_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return at most `most` characters: the start, the number left out, and the end, where the answer usually is."""
    if len(text) <= most:
        return visible(text)
    left_out, end = len(text) - most, len(text) - most // 3
    return f"{visible(text[: end - left_out])}\n… {left_out:,} more characters …\n{visible(text[end:])}"


def as_words(name: str) -> str:
    """Return a verdict as the terminal shows it: `all right` for `all_right`."""
    return name.replace("_", " ")


def format_number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e15 else f"{value:g}"


def format_time(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a time in UTC, or a dash if it is missing or out of range."""
    try:
        return "–" if seconds is None else time.strftime(form, time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"
