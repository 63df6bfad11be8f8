"""Record what a run reports: in its database, in the terminal and in the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from dapo.config import Config
from dapo.store.database import RunDatabase
from dapo.store.trackers import Trackers
from dapo.terminal.console import Reporter
from dapo.training.disk import disk_plan, disk_warning
from dapo.training.run_directory import RunDirectory
from dapo.types import EvalReport, Event, EventKind, StepReport


class Recorder:
    """The one writer of the run's database.

    Steps are written in the background, so that the next step's sampling does not wait for the disk. Every other write
    waits for them first, which keeps the order. Before `open`, events are only shown: no database exists yet.
    """

    def __init__(self, directory: RunDirectory, reporter: Reporter) -> None:
        self.directory = directory
        self.reporter = reporter
        self.database: RunDatabase | None = None
        self.trackers: Trackers | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._writing: Future[None] | None = None
        self._step = 0  # the step that new events belong to

    def open(self, config: Config, about: Mapping[str, str], step: int) -> None:
        """Open the database and the trackers, and remove the records of steps after `step`."""
        self._step = step
        self.database = self.directory.begin(about)
        if self.directory.resume:
            undone = self.database.rewind(step)
            # `rewind` has recorded this event already, so it is only shown here.
            what = f"after step {step}" + (
                f"; {undone} later step{'s are' if undone > 1 else ' is'} undone" if undone else ""
            )
            self.reporter.event(Event(EventKind.RESUMED, what, step))
            if self.directory.change:  # recorded with the options themselves
                self.reporter.event(self.directory.change)
        self.trackers = Trackers(config, step, on_failure=lambda message: self.event(EventKind.TRACKER, message))

    def step(self, report: StepReport) -> None:
        assert self.database and self.trackers
        self.flush()
        self.directory.require_in_place()
        self._writing = self._thread.submit(self.database.record_step, report)
        self._step = report.step
        self.reporter.step(report)
        self.trackers.step(report)

    def evaluation(self, reports: Sequence[EvalReport]) -> None:
        """Record an evaluation: one report per set, all or nothing."""
        assert self.database and self.trackers
        self.flush()
        self.database.record_eval(*reports)
        for report in reports:
            self.reporter.evaluation(report)
            self.trackers.evaluation(report)

    def event(self, kind: EventKind, message: str) -> None:
        event = Event(kind, message, self._step)
        if self.database:
            self.flush()
            self.database.record_event(event)
        self.reporter.event(event)

    def disk(self, config: Config, checkpoint: int) -> None:
        """Report what the run will write, and warn if the disk cannot hold two checkpoints of `checkpoint` bytes."""
        self.event(EventKind.PLAN, disk_plan(config, checkpoint))
        if warning := disk_warning(config, checkpoint):
            self.event(EventKind.DISK, warning)

    def rewind(self, step: int) -> int:
        """Remove the records of the steps after `step`, and return their number."""
        assert self.database
        self.flush()
        self._step = step
        return self.database.rewind(step)

    def evaluations(self, step: int | None = None) -> tuple[EvalReport, ...]:
        """Return the recorded evaluations of a step, one per set; by default those of the newest evaluated step."""
        assert self.database
        return self.database.eval_reports(step)

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all recorded steps."""
        assert self.database
        return self.database.total(metric)

    def flush(self) -> None:
        """Wait until all steps are in the database; raise if one could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        with ExitStack() as stack:  # closes in reverse order, and all of them even if one fails
            if self.database:
                stack.callback(self.database.close)
            stack.callback(self._thread.shutdown)
            stack.callback(self.flush)
            if self.trackers:
                stack.callback(self.trackers.close)
