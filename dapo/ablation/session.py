"""Train the runs of a plan one after the other. Which runs are finished is read from their directories."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dapo.ablation.plan import Plan, PlannedRun
from dapo.ablation.process import WorkerProcess
from dapo.ablation.records import Status, read_status
from dapo.ablation.task import Base, Outcome, Task
from dapo.errors import DapoError
from dapo.store.configuration import CHECKPOINTS, DATABASE_FILE
from dapo.store.database import RunDatabase
from dapo.terminal.console import Verbosity
from dapo.training.run_directory import is_locked
from dapo.types import Event, EventKind


@dataclass(slots=True)
class Session:
    """One call of `dapo ablate`: its settings, and how its runs ended.

    `on_run` is called with a run, its number, a message about it, and the style in which to show the message. `on_end`
    is called when a run has finished or failed.
    """

    plan: Plan
    keep_checkpoints: bool
    verbosity: Verbosity
    on_run: Callable[[int, PlannedRun, str, str], None]
    on_end: Callable[[], object] = lambda: None
    failures: dict[str, str] = field(default_factory=dict)  # run name -> sentence
    signal: int | None = None  # the signal that ended the session early

    def unfinished(self) -> list[tuple[int, PlannedRun]]:
        """Return the runs that are left to train, with their numbers."""
        return [(i, run) for i, run in enumerate(self.plan.runs, start=1) if not read_status(run.folder).is_done]

    def begin(self, number: int, run: PlannedRun, base: Base | None, where: str = "") -> Task:
        """Announce a run, and return the task for the worker that trains it. `where` is its node on Ray."""
        resume = read_status(run.folder) != Status.MISSING
        self.on_run(number, run, ("resumes" if resume else "starts") + (f" on {where}" if where else ""), "bold")
        plan = self.plan
        return Task(
            run.config, plan.budget, plan.recipe, resume, base, self.keep_checkpoints, self.verbosity, bool(where)
        )

    def end(self, number: int, run: PlannedRun, outcome: Outcome) -> Status:
        """Record how a run ended, and return its status."""
        status = read_status(run.folder)
        failure = None if status.is_done else outcome.failure  # a process may also die after its run has finished
        if status.is_done and not self.keep_checkpoints:  # even if a signal came while it finished
            shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)
        if self.signal is None and failure is not None:
            self.failures[run.config.run.name] = failure
            _record_failure(run.folder, failure)
            self.on_run(number, run, f"failed: {failure}", "bold red")
        elif self.signal is None and status == Status.ENDED_EARLY:
            self.on_run(number, run, "ended early: nothing left to learn", "bold")
        if self.signal is None:
            self.on_end()
        return status if failure is None else Status.FAILED


def train_in_turn(session: Session) -> None:
    """Train every run that is not finished. If one fails, record it and continue with the next."""
    worker = WorkerProcess()
    try:
        for number, run in session.unfinished():
            task = session.begin(number, run, recorded_base(run, session.plan))
            outcome, session.signal = worker.train(task)
            session.end(number, run, outcome)
            if session.signal is not None:
                return
            if outcome.failure is not None:
                worker.close()
    finally:
        worker.close()


def recorded_base(run: PlannedRun, plan: Plan) -> Base | None:
    """Return the first evaluation of another run if this run's would be the same, or None."""
    for other in plan.runs:
        file = other.folder / DATABASE_FILE
        if other is not run and file.exists() and run.has_base_of(other):
            with suppress(DapoError), RunDatabase.open_readonly(file) as database:
                if reports := database.eval_reports(0):
                    return Base(other.config.run.name, reports)
    return None


def _record_failure(folder: Path, failure: str) -> None:
    """Add the failure to the run's events, unless the trainer has done so, or another process is training the run."""
    with suppress(DapoError, OSError):  # a run that failed before it began has no database
        if is_locked(folder) or not RunDatabase.exists(folder / DATABASE_FILE):
            return
        with RunDatabase.open(folder / DATABASE_FILE) as database:
            # An attempt that resumed the run has recorded that, so an earlier failure is not the last event.
            if not any(event["message"] == failure for event in database.endings()[-1:]):
                database.record_event(Event(EventKind.STOPPED, failure, database.last_step()))
