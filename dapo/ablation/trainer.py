"""The trainer of one run of an ablation: it ends when the budget is spent, and shares the first evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dapo.ablation.plan import Budget
from dapo.ablation.records import early_end
from dapo.ablation.task import Base, Line, News, Task
from dapo.checkpoint.state import TrainerState
from dapo.config import Config
from dapo.errors import NothingToLearn
from dapo.terminal.console import STYLES, ConsoleReporter, Reporter, Verbosity
from dapo.terminal.evaltable import heading, headline, with_interval
from dapo.terminal.output import log_console
from dapo.training.trainer import Trainer
from dapo.types import EvalReport, Event, EventKind, StepReport, event_severity


class ArmTrainer(Trainer):
    """Trains until the budget is spent. It is checked after each step, so the step that exceeds it is the last.

    A run that finds nothing left to learn records why, is evaluated, and counts as finished.

    Once the last step is evaluated it is saved only if a checkpoint is to be kept.
    """

    def __init__(self, task: Task, reporter: Reporter, on_base: Callable[[Base], object] = lambda base: None) -> None:
        self.task, self.on_base = task, on_base
        self.tokens = 0.0  # generated in all recorded steps
        self.early_end: int | None = None  # the step after which nothing was left to learn
        super().__init__(task.config, resume=task.resume, reporter=reporter, recipe=task.recipe)

    def read_totals(self) -> None:
        super().read_totals()
        self.tokens = self.recorder.total("tokens/generated")
        if isinstance(self.reporter, BudgetReporter):
            self.reporter.spent = self.task.budget.spent(self.seconds, self.tokens)
        assert self.recorder.database
        if early_end(self.recorder.database, self.step) is not None:  # its last evaluation was interrupted
            self.early_end = self.step

    @property
    def is_finished(self) -> bool:
        is_spent = self.task.budget.spent(self.seconds, self.tokens) >= self.task.budget.amount
        return self.step == self.early_end or super().is_finished or is_spent

    def train_step(self) -> StepReport:
        report = super().train_step()
        self.tokens += report.metrics["tokens/generated"]
        return report

    def _stop_if_pointless(self, stop: str | None) -> None:
        try:
            super()._stop_if_pointless(stop)
        except NothingToLearn:
            self.early_end = self.step
            # Now, so that a process killed in the evaluation leaves the mark that `early_end` reads.
            self.recorder.event(EventKind.INTERRUPTED, f"after step {self.step}, before its evaluation")

    def _evaluate_first(self) -> None:
        if self.step == 0 and not self.recorder.evaluations(0) and (shared := self._shared_reports()):
            self.recorder.evaluation(shared)
            assert self.task.base is not None
            self.recorder.event(
                EventKind.CONFIGURATION,
                f"the evaluation before the first step is that of {self.task.base.name}: same model, questions and "
                "random numbers",
            )
        super()._evaluate_first()
        if self.task.base is None and (reports := self.recorder.evaluations(0)):
            self.on_base(Base(self.config.run.name, reports))

    def _shared_reports(self) -> list[EvalReport]:
        """Return the first evaluation of the base run, with this run's prompts.

        Empty if the questions differ, or if none of a set could be judged: the judge may work again.
        """
        if self.task.base is None:
            return []
        recorded = {report.name: report for report in self.task.base.reports}
        reports = []
        for name, prompts in self.data.eval_sets.items():
            by_uid = {prompt.uid: prompt for prompt in prompts}
            found = recorded.get(name)
            if found is None or not found.is_judged or by_uid.keys() != {sample.prompt.uid for sample in found.samples}:
                return []
            samples = tuple(replace(sample, prompt=by_uid[sample.prompt.uid]) for sample in found.samples)
            reports.append(replace(found, samples=samples))
        return reports

    def save_checkpoint(self, state: TrainerState | None = None, *, in_background: bool = False) -> None:
        if self.task.keeps_checkpoint or not self._is_complete:
            super().save_checkpoint(state, in_background=in_background)


class BudgetReporter(ConsoleReporter):
    """Shows seconds or tokens in the progress bar if they are the budget."""

    def __init__(self, budget: Budget, verbosity: Verbosity) -> None:
        super().__init__(log_console(), verbosity)
        self.budget, self.spent = budget, 0.0
        self.metric = {"seconds": "timing_s/step", "tokens": "tokens/generated"}.get(budget.unit)

    def reset_bar(self, config: Config, first_step: int) -> None:
        super().reset_bar(config, first_step)
        if self.metric is not None:
            self.progress.update(self.task, description=self.budget.unit, total=self.budget.amount)
            self._show_spent()

    def step(self, report: StepReport) -> None:
        super().step(report)
        if self.metric is not None:
            self.spent += report.metrics[self.metric]
            self._show_spent()

    def _show_spent(self) -> None:
        self.progress.update(self.task, completed=round(self.spent, 1))


class LineReporter(Reporter):
    """Sends a line for each evaluation and warning to the driver, which shows the lines of all runs.

    If quiet, it sends only warnings. The driver itself reports how a run ended.
    """

    def __init__(self, send: Callable[[News], object], verbosity: Verbosity) -> None:
        self.send, self.verbosity = send, verbosity

    def step(self, report: StepReport) -> None:
        for event in report.events:
            self.event(event)

    def evaluation(self, report: EvalReport) -> None:
        if self.verbosity != "quiet":
            main = headline(report.metrics)[0]
            result = f"{heading(main)} {with_interval(report.metrics, main)}"
            self.send(Line(f"at step {report.step}: {report.name} {result}", "cyan"))

    def event(self, event: Event) -> None:
        if (severity := event_severity(event.kind)) != "info" and event.kind != EventKind.STOPPED:
            self.send(Line(f"{event.kind}: {event.message}", STYLES[severity]))
