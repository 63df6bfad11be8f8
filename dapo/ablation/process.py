"""The process that trains the runs, from its parent's side: start it, send it tasks and signals, notice its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from typing import Any

from dapo.ablation.task import News, Outcome, Task
from dapo.training.signals import handler

# Gives the worker this process's import path. With -m, the working directory would come first.
_COMMAND = (
    "import signal, sys; _, socket, lifeline, *sys.path = sys.argv; "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # while nothing is trained, Ctrl-C ends it without a traceback
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "  # Ray blocks it in the processes that it starts
    "from dapo.ablation.worker import main; main(int(socket), int(lifeline))"
)


class WorkerProcess:
    """The worker process, started for the first task and again after `close`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def train(self, task: Task) -> tuple[Outcome, int | None]:
        """Train one run. Return how it ended, and the signal that this process got meanwhile."""
        self.start()
        with signals_collected(self.send_signal) as received:
            self.begin(task)
            while not isinstance(outcome := self.news(), Outcome):
                pass
        return outcome, received[0] if received else outcome.signal

    def begin(self, task: Task) -> None:
        """Start to train a run. `news` then returns its messages."""
        self.start()
        with suppress(BrokenPipeError, ConnectionResetError):  # if the process is dead, `news` says so
            self.connection.send(task)

    def news(self) -> News:
        """Wait for the next message of the process. The outcome is the last one of a task."""
        assert self.process is not None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            how = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
            return Outcome(failure=f"the process that trained the run died ({how})")

    def send_signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def close(self) -> None:
        """Kill the process, if there is one. The run that it was training can be resumed."""
        if self.process is None:
            return
        self.connection.close()
        os.close(self.lifeline)  # kills it
        self.process.wait()
        self.process = None

    def start(self) -> None:
        if self.process is not None:
            return
        self.connection, there = Pipe()
        lifeline, self.lifeline = os.pipe()
        # A session of its own: Ctrl-C in a terminal reaches only this process, which passes it on once.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, str(there.fileno()), str(lifeline), *sys.path],
            stdin=subprocess.DEVNULL,
            env=self.environment,
            pass_fds=(there.fileno(), lifeline),
            start_new_session=True,
        )
        there.close()
        os.close(lifeline)


@contextmanager
def signals_collected(on_signal: Callable[[int], None] = lambda number: None) -> Iterator[list[int]]:
    """Yield a list that collects SIGINT, SIGTERM and SIGHUP during the block, and call `on_signal` for each.

    From the third on they become SIGKILL: a process that is stuck outside Python does not react to others.
    """
    received: list[int] = []

    def collect(number: int, _: Any) -> None:
        received.append(number if len(received) < 2 else signal.SIGKILL)
        on_signal(received[-1])

    with handler(collect):
        yield received
