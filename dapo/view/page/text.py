"""Text of models and datasets as it may be shown: as text, all of it visible, and not megabytes at a time."""

from __future__ import annotations

import time

from dapo.store.encoding import visible

__all__ = ["MAX_CHARACTERS", "moment", "number", "shown", "visible"]

MAX_CHARACTERS = 20_000


def shown(text: str, most: int = MAX_CHARACTERS) -> str:
    """How the text begins, and how much is left."""
    if len(text) <= most:
        return visible(text)
    return visible(text[:most]) + f"\n… {len(text) - most:,} more characters"


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e15 else f"{value:g}"


def moment(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """A time in UTC; a dash for none, and for one that no calendar has."""
    try:
        return "–" if seconds is None else time.strftime(form, time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"
