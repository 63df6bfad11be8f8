"""Text of models and datasets as it may be shown: as text, all of it visible, and not megabytes at a time."""

from __future__ import annotations

import re
import unicodedata

MAX_CHARACTERS = 20_000
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")

_SHORT = {0x00: "nul", 0x07: "bell", 0x08: "backspace", 0x0C: "form feed", 0x0D: "cr", 0x1B: "esc", 0x7F: "del"}


def visible(text: str) -> str:
    """Signs that steer a terminal or turn the direction of writing are named instead of obeyed."""
    return _HIDDEN.sub(_named, text)


def shown(text: str, most: int = MAX_CHARACTERS) -> str:
    """How the text begins, and how much is left."""
    if len(text) <= most:
        return visible(text)
    return visible(text[:most]) + f"\n… {len(text) - most:,} more characters"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _named(found: re.Match[str]) -> str:
    sign = found.group()
    code = ord(sign)
    # Words, because few fonts have the pictures that Unicode has for the first 32.
    short = _SHORT.get(code, f"U+{code:04X}")
    return f"⟨{unicodedata.name(sign, short)}⟩"
