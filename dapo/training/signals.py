"""Ctrl-C, SIGTERM and the loss of the terminal during training."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on SIGINT, SIGTERM and SIGHUP during the block. Outside the main thread this does nothing."""
    previous: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks for
                previous[number] = signal.signal(number, handler)
    except ValueError:
        pass  # not in the main thread, which handles signals itself
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
