"""How values become SQLite columns and come back."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

TOKENS = "<i4"
FLOATS = "<f4"
_DEEPEST = 50  # objects and lists within each other; whoever walks through a value may recurse

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_SHORT = {0x00: "nul", 0x07: "bell", 0x08: "backspace", 0x0C: "form feed", 0x0D: "cr", 0x1B: "esc", 0x7F: "del"}


def to_text(value: str) -> str:
    """SQLite takes only valid UTF-8, so a lone surrogate is written out as \\udXXX; everything else stays as it is."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> str:
    # A surrogate escaped by to_text is also a correct JSON escape, so JSON columns give it back unchanged.
    return to_text(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def from_json(text: str, kind: type) -> Any:
    """Return the value of a JSON column; a ValueError says that it is no `kind`, or nested too deeply."""
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"a JSON {type(value).__name__} is where a {kind.__name__} belongs")
    level, depth = [value], 0
    while level := [item for each in level for item in _items(each)]:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"JSON is nested more than {_DEEPEST} deep")
    return value


def messages_from_json(text: str) -> list[dict[str, Any]]:
    messages = from_json(text, list)
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("a chat message is no JSON object")
    return messages


def switches_from_json(text: str) -> list[int]:
    switches = from_json(text, list)
    if not all(type(place) is int and 0 <= place < 2**31 for place in switches):
        raise ValueError("switches are no places in a response")
    return switches


def figures_from_json(text: str) -> dict[str, float]:
    """Metrics by name. JSON has no NaN and no infinities: they are stored by their names."""
    return {name: float(value) for name, value in from_json(text, dict).items()}


def visible(text: str) -> str:
    """Name the characters that steer a terminal or turn the direction of writing, so that nothing obeys them."""
    return _HIDDEN.sub(_named, text)


def to_blob(values: Any, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def from_blob(blob: bytes | None, dtype: str) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, dtype)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _named(found: re.Match[str]) -> str:
    sign = found.group()
    code = ord(sign)
    # Words, because few fonts have the pictures that Unicode has for the first 32.
    short = _SHORT.get(code, f"U+{code:04X}")
    return f"⟨{unicodedata.name(sign, short)}⟩"


def _plain(value: Any) -> Any:
    """What JSON can say; the rest as its `str`, so that a strange value from a reward function cannot stop a run."""
    if isinstance(value, float):
        # JSON has no NaN or infinity. Their names survive, and float() understands them.
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return str(value)
