"""Messages to people while something takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SLOW = 2.0  # seconds after which people want to know


def wait_visibly(
    futures: Sequence[Future[Any]],
    say: Callable[[str], None],
    what: Callable[[], str],
    *,
    for_all: bool = True,
    then: str = "",
) -> None:
    """Wait for all futures, or for one; every two seconds, say how long that has taken and what is waited for.

    Waiting for all waits in the futures themselves, and raises what they raise. `then` is said after a long wait.
    """
    start, has_told = time.monotonic(), False

    def tell() -> None:
        nonlocal has_told
        has_told = True
        say(f"waiting {time.monotonic() - start:.0f} s for {what()}")

    while futures and not for_all and not wait(futures, SLOW, FIRST_COMPLETED).done:
        tell()
    for future in futures if for_all else ():
        while not future.done():
            try:
                future.result(SLOW)
            except TimeoutError:
                tell()
    if has_told and then:
        say(then)


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
    timer = threading.Timer(SLOW, console.print, [escape(message) + " ..."], {"soft_wrap": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
