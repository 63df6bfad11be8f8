"""The encoding of values in SQLite columns: text, JSON and blobs."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any

import numpy as np

TOKENS = "<i4"  # little-endian int32
FLOATS = "<f4"  # little-endian float32
_DEEPEST = 50  # levels of nested objects and lists; code that walks through a value may recurse

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_SHORT = {0x00: "nul", 0x07: "bell", 0x08: "backspace", 0x0C: "form feed", 0x0D: "cr", 0x1B: "esc", 0x7F: "del"}


_TEXT_BYTES = 4  # per token, roughly
_ROW_BYTES = 400  # per response: its row, the row of its tokens, and their entries in the indexes


def response_bytes(tokens: int, *, has_tokens: bool, is_trained: bool) -> int:
    """Estimate the bytes that a response of this many tokens takes in the database."""
    # Token ids and the sampler's log-probabilities; of trained ones also the policy's log-probabilities and entropies.
    values = (4 if is_trained else 2) if has_tokens else 0
    return _ROW_BYTES + tokens * (_TEXT_BYTES + 4 * values)


def to_text(value: str) -> str:
    """Write lone surrogates out as \\udXXX, because SQLite takes only valid UTF-8; leave all else as it is."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> str:
    # The \udXXX of to_text is also a valid JSON escape, so a lone surrogate survives in JSON columns.
    return to_text(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def from_json(text: str, kind: type) -> Any:
    """Return the value of a JSON column; raise ValueError if it is not a `kind` or is nested too deeply."""
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"found a JSON {type(value).__name__} instead of a {kind.__name__}")
    level, depth = [value], 0
    while level := [item for each in level for item in _items(each)]:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"JSON is nested more than {_DEEPEST} deep")
    return value


def messages_from_json(text: str) -> list[dict[str, Any]]:
    messages = from_json(text, list)
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("a chat message is not a JSON object")
    return messages


def switches_from_json(text: str) -> list[int]:
    switches = from_json(text, list)
    if not all(type(position) is int and 0 <= position < 2**31 for position in switches):
        raise ValueError("switches are not positions in a response")
    return switches


def given_from_json(text: str) -> list[list[int]]:
    """Return the spans of tokens that an environment gave, in order and apart from each other."""
    spans = from_json(text, list)
    if not all(isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span) for span in spans):
        raise ValueError("given tokens are not spans of positions in a response")
    positions = [at for span in spans for at in span]
    if not all(0 <= before < after < 2**31 for before, after in pairwise(positions)):
        raise ValueError("the spans of given tokens are not in order")
    return spans


def turns_from_json(text: str) -> list[dict[str, Any]]:
    """Return the turns of an episode; an empty list for a response of one turn."""
    turns = from_json(text, list)
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("text"), str):
            raise ValueError("a turn is not a JSON object with a text")
        for name in ("messages", "calls"):
            parts = turn.get(name)
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise ValueError(f"the {name} of a turn are not JSON objects")
        if type(turn.get("seconds")) not in (int, float) or type(turn.get("reward", 0)) not in (int, float):
            raise ValueError("the seconds or the reward of a turn are not a number")
    return turns


def metrics_from_json(text: str) -> dict[str, float]:
    """Return metrics by name. NaN and infinities, which JSON does not have, are stored as strings."""
    return {name: float(value) for name, value in from_json(text, dict).items()}


def visible(text: str) -> str:
    """Replace characters that control a terminal or the direction of text by their names in ⟨⟩."""
    return _HIDDEN.sub(_named, text)


def to_blob(values: Any, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def from_blob(blob: bytes | None, dtype: str) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, dtype)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _named(found: re.Match[str]) -> str:
    character = found.group()
    code = ord(character)
    # Unicode has no names for control characters, and few fonts show its symbols for them.
    short = _SHORT.get(code, f"U+{code:04X}")
    return f"⟨{unicodedata.name(character, short)}⟩"


def _plain(value: Any) -> Any:
    """Convert to values that JSON has; anything else becomes its `str`, so that no reward function can stop a run."""
    if isinstance(value, float):
        # JSON has no NaN or infinity. They become strings that float() understands.
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
