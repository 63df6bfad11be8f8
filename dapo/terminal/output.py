"""The output of commands: JSON, and a console whose lines in a file or a pipe begin with the time."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console

from dapo.store.encoding import visible


def log_console() -> Console:
    """Return a console on standard output, whose lines begin with the time unless it is a terminal or a notebook."""
    console = Console()
    if console.is_terminal or console.is_jupyter:
        return console
    return Console(file=StampedLines(sys.stdout))  # pyright: ignore[reportArgumentType]


def json_text(document: Any) -> str:
    """Return a document as JSON. NaN and infinity become null, because JSON has neither."""
    return json.dumps(_finite(document), indent=2, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StampedLines(io.TextIOBase):
    """Writes whole lines to a file, each after the local time and without control characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rest = ""  # the start of a line that is not complete

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.writelines(f"{now} {visible(line)}".rstrip() + "\n" for line in lines)
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._file.encoding
