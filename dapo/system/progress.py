"""A message on stderr while something takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Show a spinner with elapsed time on a terminal; elsewhere print one line if the block takes over two seconds."""
    console = Console(file=sys.stderr)
    # rich replaces stderr by a FileProxy while another live display is active. A second display would garble both, so
    # print a line above it instead.
    if console.is_terminal and not isinstance(sys.stderr, FileProxy):
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(escape(message), total=None)
            yield
        return
    timer = threading.Timer(2.0, console.print, [escape(message) + " ..."], {"soft_wrap": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
