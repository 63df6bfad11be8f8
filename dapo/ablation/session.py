"""Train the runs of a plan one after the other. The run directories say which runs are finished."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from dapo.ablation.plan import Plan, PlannedRun
from dapo.ablation.records import Status, read_status
from dapo.ablation.trainer import Task
from dapo.ablation.worker import Outcome
from dapo.errors import DapoError
from dapo.store.configuration import DATABASE_FILE
from dapo.store.database import RunDatabase
from dapo.terminal.console import Verbosity
from dapo.training.signals import handler
from dapo.types import Event, EventKind

# Gives the worker this process's import path. With -m, the working directory would come first in it.
_COMMAND = (
    "import signal, sys; _, socket, lifeline, *sys.path = sys.argv; "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # while nothing is trained, Ctrl-C ends it without a traceback
    "from dapo.ablation.worker import main; main(int(socket), int(lifeline))"
)


@dataclass(slots=True)
class Session:
    """The outcome of one call of `dapo ablate`."""

    failures: dict[str, str] = field(default_factory=dict)  # run name -> sentence
    signal: int | None = None  # the one that ended it early


def train_all(
    plan: Plan, *, keep_checkpoints: bool, verbosity: Verbosity, on_run: Callable[[int, PlannedRun, str], None]
) -> Session:
    """Train every run that is not finished. If one fails, this is recorded, and the next is trained.

    `on_run` is called when a run starts, resumes, fails or ends early, with its number and these words.
    """
    session, worker = Session(), _Worker()
    try:
        for number, run in enumerate(plan.runs, start=1):
            status = read_status(run.folder)
            if status.is_done:
                continue
            resume = status != Status.MISSING
            on_run(number, run, "resumes" if resume else "starts")
            base = _base_of(run, plan)
            task = Task(run.config, plan.budget, plan.recipe, resume, base, keep_checkpoints, verbosity)
            outcome, session.signal = worker.train(task)
            status = Status.FAILED if outcome.failure is not None else read_status(run.folder)
            if status.is_done and not keep_checkpoints:  # also if a signal came while it finished
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
            if session.signal is not None:
                break
            if outcome.failure is not None:
                session.failures[run.config.run.name] = outcome.failure
                _record_failure(run.folder, outcome.failure)
                on_run(number, run, f"failed: {outcome.failure}")
                worker.close()
            elif status == Status.ENDED_EARLY:
                on_run(number, run, "ended early: nothing left to learn")
    finally:
        worker.close()
    return session


def _base_of(run: PlannedRun, plan: Plan) -> Path | None:
    """Return a run that has evaluated the same model with the same questions and random numbers, or None."""
    for other in plan.runs:
        file = other.folder / DATABASE_FILE
        if other is not run and file.exists() and run.has_base_of(other):
            with suppress(DapoError), RunDatabase.open_readonly(file) as database:
                if database.eval_reports(0):
                    return other.folder
    return None


def _record_failure(folder: Path, failure: str) -> None:
    """Add the failure to the run's events, unless the trainer has done so."""
    with suppress(DapoError, OSError):  # a run that failed before it began has no database
        if not RunDatabase.exists(folder / DATABASE_FILE):
            return
        with RunDatabase.open(folder / DATABASE_FILE) as database:
            if not any(event["message"] == failure for event in database.events()):
                database.record_event(Event(EventKind.STOPPED, failure, database.last_step()))


class _Worker:
    """The worker process, started for the first task and again after `close`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def train(self, task: Task) -> tuple[Outcome, int | None]:
        """Train one run. Return how it ended, and the signal that this process got meanwhile."""
        if self.process is None:
            self._start()
        assert self.process is not None
        with _signals_passed_on(self.process) as received:
            try:
                self.connection.send(task)
                outcome: Outcome = self.connection.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                code = self.process.wait()
                how = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
                outcome = Outcome(failure=f"the process that trained the run died ({how})")
        return outcome, received[0] if received else outcome.signal

    def close(self) -> None:
        """Kill the process, if there is one. The run that it was training can be resumed."""
        if self.process is None:
            return
        self.connection.close()
        os.close(self.lifeline)  # kills it
        self.process.wait()
        self.process = None

    def _start(self) -> None:
        self.connection, there = Pipe()
        lifeline, self.lifeline = os.pipe()
        # A session of its own: Ctrl-C in a terminal reaches only this process, which passes it on once.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, str(there.fileno()), str(lifeline), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=(there.fileno(), lifeline),
            start_new_session=True,
        )
        there.close()
        os.close(lifeline)


@contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Send SIGINT, SIGTERM and SIGHUP on to the process during the block, and yield a list that collects them."""
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)

    with handler(pass_on):
        yield received
