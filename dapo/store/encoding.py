"""How values become SQLite columns and come back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

TOKENS = "<i4"
FLOATS = "<f4"


def to_text(value: str) -> str:
    """SQLite takes only valid UTF-8, so a lone surrogate is written out as \\udXXX; everything else stays as it is."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> str:
    # A surrogate escaped by to_text is also a correct JSON escape, so JSON columns give it back unchanged.
    return to_text(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def to_blob(values: Any, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def from_blob(blob: bytes | None, dtype: str) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, dtype)


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
