"""The trainer of one run of an ablation: it ends when the budget is spent, and shares the first evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dapo.ablation.plan import Budget
from dapo.checkpoint.state import TrainerState
from dapo.config import Config
from dapo.errors import NothingToLearn
from dapo.store.configuration import DATABASE_FILE
from dapo.store.database import RunDatabase
from dapo.terminal.console import ConsoleReporter, Reporter, Verbosity
from dapo.training.trainer import Trainer
from dapo.types import EvalReport, EventKind, StepReport


@dataclass(frozen=True, slots=True)
class Task:
    """One run, as the worker process gets it."""

    config: Config
    budget: Budget
    recipe: str
    resume: bool
    base: Path | None  # a run whose evaluation before the first step is also that of this one
    keeps_checkpoint: bool
    verbosity: Verbosity


class ArmTrainer(Trainer):
    """Trains until the budget is spent, decided between steps: the step in which it runs out is the last.

    A run that finds nothing left to learn ends there, finished and evaluated, after the event that says why.

    If no checkpoint is kept, the last step is not saved: an interrupted run resumes from the checkpoint before it. Nor
    is it saved if a signal interrupted its evaluation.
    """

    def __init__(self, task: Task, reporter: Reporter) -> None:
        self.task = task
        self.tokens = 0.0  # generated in all steps
        self.ends_early = False
        super().__init__(task.config, resume=task.resume, reporter=reporter, recipe=task.recipe)

    def read_totals(self) -> None:
        super().read_totals()
        assert self.recorder.database
        self.tokens, self.ends_early = self.recorder.database.total("tokens/generated"), False

    @property
    def is_finished(self) -> bool:
        return self.ends_early or super().is_finished or self.task.budget.is_spent(self.seconds, self.tokens)

    def train_step(self) -> StepReport:
        report = super().train_step()
        self.tokens += report.metrics["tokens/generated"]
        return report

    def _stop_if_pointless(self, stop: str | None) -> None:
        try:
            super()._stop_if_pointless(stop)
        except NothingToLearn:
            self.ends_early = True

    def _evaluate_first(self) -> None:
        if self.step == 0 and not self.recorder.evaluations(0) and (shared := self._shared_reports()):
            for report in shared:
                self.recorder.evaluation(report)
            assert self.task.base is not None
            self.recorder.event(
                EventKind.CONFIGURATION,
                f"the evaluation before the first step is that of {self.task.base.name}: same model, questions and "
                "random numbers",
            )
        super()._evaluate_first()

    def _shared_reports(self) -> list[EvalReport]:
        """Return the first evaluation of the base run with this run's prompts; nothing if it has other questions."""
        if self.task.base is None:
            return []
        with RunDatabase.open_readonly(self.task.base / DATABASE_FILE) as database:
            recorded = {report.name: report for report in database.eval_reports(0)}
        reports = []
        for name, prompts in self.data.eval_sets.items():
            by_uid = {prompt.uid: prompt for prompt in prompts}
            found = recorded.get(name)
            if found is None or by_uid.keys() != {sample.prompt.uid for sample in found.samples}:
                return []
            samples = tuple(replace(sample, prompt=by_uid[sample.prompt.uid]) for sample in found.samples)
            reports.append(replace(found, samples=samples))
        return reports

    def save_checkpoint(self, state: TrainerState | None = None, *, in_background: bool = False) -> None:
        is_evaluated = any(report.step == self.step for report in self.evaluator.reports)
        if not self.is_finished or (self.task.keeps_checkpoint and is_evaluated):
            super().save_checkpoint(state, in_background=in_background)


class BudgetReporter(ConsoleReporter):
    """Shows seconds or tokens in the progress bar if they are the budget."""

    def __init__(self, budget: Budget, verbosity: Verbosity) -> None:
        from dapo.terminal.output import log_console

        super().__init__(log_console(), verbosity)
        self.budget, self.spent = budget, 0.0

    def step(self, report: StepReport) -> None:
        super().step(report)
        metric = {"seconds": "timing_s/step", "tokens": "tokens/generated"}.get(self.budget.unit)
        if metric is not None:
            self.spent += report.metrics[metric]
            unit, amount = self.budget.unit, self.budget.amount
            self.progress.update(self.task, description=unit, total=amount, completed=round(self.spent, 1))
