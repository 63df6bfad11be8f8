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
from rich.table import Table

from dapo.store.encoding import visible


def log_console() -> Console:
    """Return a console on standard output, whose lines begin with the time unless it is a terminal or a notebook."""
    console = Console()
    if console.is_terminal or console.is_jupyter:
        return console
    return Console(file=StampedLines(sys.stdout))  # pyright: ignore[reportArgumentType]


# Columns of a terminal: no limit, and of names in a terminal that is too narrow.
_UNLIMITED, _MOST_FOR_NAMES, _LEAST_FOR_NAMES = 10_000, 20, 4


def print_table(console: Console, table: Table) -> None:
    """Print a table whose first column has names: within a terminal's width, but in a file or a pipe at its full width.

    In a narrow terminal the other columns wrap first: names of up to 20 characters stay whole if they can.
    """
    options = console.options.update(max_width=_UNLIMITED)
    width = console.measure(table, options=options).maximum
    if not console.is_terminal:
        table.width = width
    elif width > console.width:
        names = table.columns[0]
        longest = max(console.render_str(str(cell)).cell_len for cell in (names.header, *names.cells))
        names.width = min(longest, _MOST_FOR_NAMES)
        excess = max(0, console.measure(table, options=options).minimum - console.width)
        names.width = max(names.width - excess, min(longest, _LEAST_FOR_NAMES))
    console.print(table, crop=console.is_terminal)


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
