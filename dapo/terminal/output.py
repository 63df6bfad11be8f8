"""The console of a long-running command: in a file or a pipe every line has its time, and no control characters."""

from __future__ import annotations

import io
import sys
import time
from typing import TextIO

from rich.console import Console

from dapo.store.encoding import visible


def log_console() -> Console:
    """Return a console on standard output, whose lines begin with the time unless it is a terminal or a notebook."""
    console = Console()
    if console.is_terminal or console.is_jupyter:
        return console
    return Console(file=StampedLines(sys.stdout))  # pyright: ignore[reportArgumentType]


class StampedLines(io.TextIOBase):
    """Writes whole lines to a file, each after the local time."""

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
