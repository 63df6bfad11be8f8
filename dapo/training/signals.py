"""Requests to end a run: Ctrl-C, SIGTERM, a closed terminal, or a call of `Trainer.stop`."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

Step = TypeVar("Step")


@dataclass(slots=True)
class StopRequest:
    """A request to end the run after the current step. A signal also ends an evaluation that is in progress."""

    signal: int | None = None
    is_asked: bool = False  # by `Trainer.stop`

    def __bool__(self) -> bool:
        return self.is_asked or self.signal is not None

    def has_signal(self) -> bool:
        return self.signal is not None


@contextmanager
def handler(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handle` on SIGINT, SIGTERM and SIGHUP during the block. Outside the main thread this does nothing."""
    previous: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks for
                previous[number] = signal.signal(number, handle)
    except ValueError:
        pass  # not in the main thread, which handles signals itself
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator of steps can be closed in another thread
            for number, former in previous.items():
                if signal.getsignal(number) == handle:  # not if it was changed since
                    signal.signal(number, former)


@contextmanager
def handled(stopping: StopRequest, on_first: Callable[[], None]) -> Iterator[None]:
    """Ask to stop and call `on_first` on the first signal during the block; stop at once on a second one."""
    is_telling = False

    def handle(number: int, _: Any) -> None:
        nonlocal is_telling
        if is_telling:  # ignore it: the user cannot have read yet that a second signal stops at once
            return
        if stopping.signal is not None:
            raise KeyboardInterrupt
        stopping.signal, is_telling = number, True
        try:
            on_first()
        finally:
            is_telling = False

    with handler(handle):
        yield


def closed_at_exit(steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
    """Return the generator. If it is still suspended when the program ends, it is closed then."""
    reference = weakref.ref(steps)

    def close() -> None:
        if (suspended := reference()) is not None:
            suspended.close()

    atexit.register(close)
    weakref.finalize(steps, atexit.unregister, close).atexit = False
    return steps
