"""The training loop: sample, update, record, save. The same trainer serves a CPU, a GPU and a cluster."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.saver import Saver
from dapo.checkpoint.state import TrainerState
from dapo.cluster.assemble import assemble
from dapo.config.functions import CustomParts, file_digests
from dapo.data.dataset import load_run_data
from dapo.environments.pool import build_environment
from dapo.errors import CheckpointError, NothingToLearn, RunExists, TrainingStopped, counted
from dapo.evaluation.evaluate import Interrupted
from dapo.model.loading import load_tokenizer
from dapo.model.tokens import token_bytes
from dapo.policy.build import model_source
from dapo.policy.policy import Policy
from dapo.rewards.judge import RewardFunctions, build_judge, check_columns, columns_seen, isolation_note, judge_kinds
from dapo.rewards.protocol import Judge
from dapo.sampling.accounting import why_empty
from dapo.sampling.drawing import Features
from dapo.sampling.episodes import Environment
from dapo.sampling.inflight import InflightSampler
from dapo.sampling.strict import DynamicSampler, Reference
from dapo.store.trackers import require_trackers
from dapo.terminal.console import ConsoleReporter, Reporter
from dapo.training import signals
from dapo.training.arguments import ConfigLike, resolve
from dapo.training.callbacks import CallbackLike, Callbacks
from dapo.training.evaluator import Evaluator, find_metric
from dapo.training.faults import faults_handled
from dapo.training.recorder import Recorder
from dapo.training.result import RunResult, close_all, environment, step_metrics, trained_model
from dapo.training.run_directory import RunDirectory, is_locked
from dapo.training.signals import StopRequest
from dapo.types import EvalReport, Event, EventKind, Group, StepReport, Verdict

MAX_EMPTY_BATCHES = 3


class Trainer:
    """Trains a language model with DAPO.

        trainer = Trainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=[correct, short],
            train_dataset=rows,
            eval_dataset=held_out,
            config={"run.steps": 50, "rollout.n": 8},
        )
        result = trainer.train()
        trainer.model.generate(...)

    config: options, as a mapping of dotted names or nested sections, the path of a recipe (YAML), or a Config.
    reward_funcs: a function, a list of functions, or a mapping of functions to weights. A function may have dapo's
        signature, TRL's or verl's. In place of a function, the name of a judge as in `reward.use` is possible.
    model: a hub id, a folder, a .gguf file; or the section `model` as a mapping.
    train_dataset: rows: a list or generator of dicts, a datasets.Dataset, a pandas DataFrame; or a path as in
        `data.train`.
    eval_dataset: the same, or a mapping of names to such sets. `eval.k` is then 1 unless it is given.
    parts: functions that replace parts of the algorithm, as `CustomParts(loss=...)`.
    callbacks: functions of (trainer, step), called after each step, or objects of subclasses of `Callback`.
    resume: continue the run `run.name` from its newest checkpoint, with its own options except those given here.
    quiet: show no progress. `reporter` shows it in another way.
    next_name: whether a new run gets the name NAME-2 if NAME exists; by default if no argument sets `run.name`.
    sections: options as `optim={"lr": 1e-5}`, `rollout={"n": 8}`, and so on.

    What is given besides `config` replaces its options. The constructor checks everything, loads data and model, and
    locks the run directory until `train` ends, `close` is called, or the trainer is deleted.
    """

    def __init__(
        self,
        config: ConfigLike | None = None,
        reward_funcs: RewardFunctions | None = None,
        *,
        model: str | PathLike[str] | Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: CallbackLike | Iterable[CallbackLike] = (),
        parts: CustomParts | None = None,
        resume: bool = False,
        quiet: bool = False,
        reporter: Reporter | None = None,
        next_name: bool | None = None,
        recipe: str | None = None,  # the recipe's name, which is recorded in the database
        **sections: Mapping[str, Any],
    ) -> None:
        given = resolve(config, reward_funcs, model, train_dataset, eval_dataset, sections, parts, resume=resume)
        self.config, self._arguments, self._recipe = given.config, given, recipe or given.recipe
        self.callbacks = Callbacks(callbacks, self)
        self.reporter = reporter or (Reporter() if quiet else ConsoleReporter())
        require_trackers(given.config.run.trackers)
        self._open(resume=resume, next_name=not given.names_run if next_name is None else next_name)

    def train(self) -> RunResult:
        """Train up to `run.steps` or `run.epochs`. A signal or `stop` ends the run earlier, after the current step.

        Called again, it continues a run that ended early.
        """
        for _ in self.steps():
            pass
        return self.result

    def steps(self) -> Iterator[StepReport]:
        """Train as `train` does, and yield the report of each step.

        By then the step is evaluated, and its saving has begun, if they are due. Leaving the loop early ends the run as
        `stop` does: it is saved, closed, and can be resumed.
        """
        return signals.closed_at_exit(self._steps())

    def _steps(self) -> Generator[StepReport, None, None]:
        self._begin()
        handled = signals.handled(self.stopping, self.reporter.stopping)
        with closing(self), handled, self.reporter.training(self.config, self.step), self.saver:
            has_begun = False
            while not has_begun:  # repeat if a learner was lost
                with faults_handled(self):
                    self._evaluate_first()
                    has_begun = True
            try:
                while not self.is_finished and not self.stopping and self._close.alive:
                    if report := self._whole_step():
                        yield report
            except GeneratorExit:  # the caller has left its loop
                pass
            if not self._close.alive:  # the caller has closed it
                return
            if self.step > self.saved_step:
                self.save_checkpoint()
            self.callbacks.save(self.saver.collect(wait=True))
            kind = EventKind.FINISHED if self._is_complete else EventKind.INTERRUPTED
            self.recorder.event(kind, f"after step {self.step}")
        self.callbacks.end(self.result)

    def stop(self) -> None:
        """Ask the run to end after the current step, saved and ready to resume."""
        self.stopping.is_asked = True

    @property
    def result(self) -> RunResult:
        """The result up to now."""
        signal = self.stopping.signal
        reports = tuple(report for report in self.evaluator.reports if report.step > 0)
        return RunResult(self.config.run_dir, self.step, self.before, reports, signal, self.seconds)

    @property
    def model(self) -> PreTrainedModel:
        """The model with its current weights, adapters merged, as transformers loads it; `tokenizer` is its tokenizer.

        It shares its memory with the model being trained, except for weights with adapters that are not merged in
        training. If other processes learn, it is loaded from the newest checkpoint.
        """
        return trained_model(self.policy, self.config.model, self.directory.checkpoints)

    def _whole_step(self) -> StepReport | None:
        """Train one step, evaluate and save as configured. Return None if the step was lost and undone."""
        with faults_handled(self):
            report = self.train_step()
            self.callbacks.save(self.saver.collect(wait=False))
            self.callbacks.step(report)
            if self.is_finished or self._is_due(self.config.eval.every):
                self._evaluate()
            if self.evaluator.is_best(self.step) or self._is_due(self.config.run.save_every):
                self.save_checkpoint(in_background=not self.is_finished and not self.stopping)
            return report
        return None

    def train_step(self) -> StepReport:
        """Run one step: Prompt -> Rollout -> Score -> Group -> Batch -> loss -> update -> report."""
        start, step = time.perf_counter(), self.step + 1
        sampled = self.sampler.fill(step, self.version)
        start += self.saver.wait_for_copy()  # saving does not count as training
        updating = time.perf_counter()
        self.reporter.phase("training")
        if self.policy.needs_engine_memory and not self.sampler.pending:
            self.engine.suspend()  # only if nothing is in flight
        update = self.policy.update(sampled.batch, step, self.version)
        if update.updates > 0:
            self.version += 1
            self.engine.sync_weights(self.version)
        end = time.perf_counter()
        metrics = step_metrics(sampled, update, train=end - updating, total=end - start) | self.saver.metrics()
        metrics |= self.engine.metrics() | self.policy.efficiency(sampled.batch, update, end - updating)
        if (epochs := self.data.stream.epochs) is not None:
            metrics["epoch"] = epochs
        notes = tuple(Event(EventKind.MEMORY, note, step) for note in update.notes)
        report = StepReport(step, metrics, sampled.groups, update.token_stats, (*sampled.events, *notes))
        self.recorder.step(report)
        self.step, self.seconds = step, self.seconds + end - start
        # Groups that `on_exhausted: skip` carries count in the step that found them.
        found_nothing = not sampled.batch and not any(g.serial in sampled.fresh for g in self.sampler.carried)
        self.empty_in_a_row = self.empty_in_a_row + 1 if found_nothing else 0
        verdicts = Counter(group.verdict for group in sampled.groups if group.verdict != Verdict.CARRIED)
        self.empty_verdicts = self.empty_verdicts + verdicts if found_nothing else Counter()
        self.last_state = self.state()
        self._stop_if_pointless(sampled.stop or update.stop)
        return report

    @property
    def is_finished(self) -> bool:
        run, drawn = self.config.run, self.data.stream.epochs
        if run.steps is not None:
            return self.step >= run.steps
        assert run.epochs is not None and drawn is not None  # Config refuses endless data
        return drawn >= run.epochs

    @property
    def _is_complete(self) -> bool:
        """Whether the last step is trained and evaluated. A signal can end the run between the two."""
        return self.is_finished and self.evaluator.has_evaluated(self.step)

    def close(self) -> None:
        """Unlock the run directory and end the run's processes, as `train` does at its end."""
        self.is_training = False
        self._close()

    def _open(self, *, resume: bool, next_name: bool) -> None:
        """Lock the run directory, build the parts of the run, and open its records."""
        wanted, is_renamed = self.config.run_dir, next_name and not resume
        self.directory = (
            RunDirectory.of_new_run(self.config) if is_renamed else RunDirectory(self.config, resume=resume)
        )
        self.config = config = self.directory.config  # its run directory is locked from here on
        self.step = self.version = self.saved_step = self.empty_in_a_row = 0
        self.seconds = 0.0
        self.empty_verdicts: Counter[str] = Counter()  # counted over the latest empty batches in a row
        self.before: tuple[EvalReport, ...] = ()
        self.stopping, self.is_training = StopRequest(), False
        with ExitStack() as undo:  # if anything below fails, release what was acquired before it
            undo.callback(self.directory.abandon)
            self.recorder = Recorder(self.directory, self.reporter)
            undo.callback(self.recorder.close)
            local = not config.cluster.reward_workers
            judge = build_judge(config.reward, self._arguments.reward_funcs) if local else None
            self.environments = build_environment(config)
            for part in filter(None, (judge, self.environments)):
                undo.callback(part.close)
            # Errors in data or model show here, before anything is written.
            self._build(judge)
            undo.callback(self.engine.close)
            if self.directory.state:
                self.restore(self.directory.saved, self.directory.state)
                if self.directory.is_finished and self.is_finished:  # by run.epochs; RunDirectory checks run.steps
                    raise CheckpointError(
                        f"{config.run_dir}: has already finished {self.data.stream.epochs:.4g} epochs; raise "
                        "run.epochs to continue"
                    )
            about = environment() | file_digests(config) | ({"recipe": self._recipe} if self._recipe else {})
            self.recorder.open(config, about, self.step)
            self.read_totals()
            if config.run_dir != wanted:
                held = "holds a run that is training now" if is_locked(wanted) else "holds another run"
                note = f"{wanted} {held}, so this one is {config.run_dir}"
                self.recorder.event(EventKind.CONFIGURATION, note)
            for note in self.data.notes:
                self.recorder.event(EventKind.DATA, note)
            if note := isolation_note(config.reward, config.environment.use, is_judging=judge is not None):
                self.recorder.event(EventKind.SANDBOX, note)
            for kind, note in self.policy.notes(self.engine.cache_bytes):
                self.recorder.event(kind, note)
            self.recorder.disk(config, self.policy.checkpoint_bytes)
            undo.pop_all()
        # Also close when the trainer is garbage-collected. Nothing in `owned` refers to it, so it can be.
        owned = self.directory, self.recorder, self.judge, self.environments, self.engine, self.saver
        self._close = weakref.finalize(self, close_all, *filter(None, owned))
        # The state after the last whole step: it is saved if the cluster is lost during the next step.
        self.last_state = self.first_state = self.state()

    def _begin(self) -> None:
        """Open the run again if an earlier `train` ended early; refuse if it is training now or has finished."""
        if self.is_training:
            raise RunExists(f"{self.config.run_dir}: this Trainer is training already")
        if not self._close.alive:
            if self._is_complete:
                raise CheckpointError(
                    f"{self.config.run_dir}: has already finished {counted(self.step, 'step')}; to continue, make a "
                    f"Trainer with resume=True, run.name='{self.config.run.name}' and a larger run.steps"
                )
            self._open(resume=self.directory.resume or self.step > 0, next_name=False)
        self.is_training, self.stopping.is_asked = True, False

    def _build(self, judge: Judge | None) -> None:
        """Build data, policy, engine, judge and sampler, with the weights of the checkpoint if there is one."""
        config, saved = self.config, self.directory.saved
        # Load the data before the weights, so that its errors show at once.
        tokenizer = load_tokenizer(model_source(config, saved).path)
        if config.rollout.stop:
            token_bytes(tokenizer)  # raises if the tokenizer does not allow stop texts
        kinds = judge_kinds(config.reward, judge)
        self.data = load_run_data(config, tokenizer, columns_seen(kinds), self._arguments.rows, self.environments)
        environment = Environment.of(config, self.environments, tokenizer)
        # An environment may score every episode itself.
        has_answers = self.environments is not None or self.data.stream.has_answers()
        check_columns(kinds, self.data.columns(), has_answers=has_answers)
        find_metric(config, self.data.eval_sets)  # raises if there is no such metric
        self.parts = assemble(config, saved, self.recorder.event, self.stopping.has_signal, self._arguments.parts)
        self.policy, self.engine, self.tokenizer = self.parts.policy, self.parts.engine, self.parts.tokenizer
        self.saver = Saver(self.directory.checkpoints, self.policy, self.tokenizer, self.recorder.event)
        judge = judge or self.parts.judge
        assert judge is not None
        self.judge = judge
        stopping, sets = self.stopping.has_signal, self.data.eval_sets
        self.evaluator = Evaluator(config, sets, self.engine, judge, self.recorder, stopping, environment)
        build_sampler = InflightSampler if config.rollout.mode == "inflight" else DynamicSampler
        self.sampler = build_sampler(
            config,
            self.engine,
            judge,
            self.data.stream,
            reference=self._reference(),
            on_group=self.callbacks.after(self.reporter.group),
            on_progress=self.reporter.responses,
            on_wait=self.reporter.phase,
            parts=self._arguments.parts,
            environment=environment,
            features=self._features(),
            learns_elsewhere=not isinstance(self.policy, Policy),
        )

    def _reference(self) -> Reference | None:
        """Return the function that computes the reference model's log-probabilities, if the run has one."""
        policy, saver = self.policy, self.saver  # not `self`, or a deleted trainer would close later

        def logprobs(groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
            # With adapters, the base weights take the place of the merged ones meanwhile, which a checkpoint holds.
            saver.wait_for_copy()
            return policy.reference_logprobs(groups)

        return logprobs if self.config.needs_reference else None

    def _features(self) -> Features | None:
        """Return the function that computes features of prompts, if the ledger looks ahead."""
        if self.config.algorithm.ledger.lookahead == 1:
            return None
        assert isinstance(self.policy, Policy)  # Config and torchrun_parts refuse others
        return self.policy.prompt_features

    def _evaluate_first(self) -> None:
        """Evaluate before the first step. On resume, use the recorded evaluation if there is one."""
        is_due = self.step == 0 or self.is_finished or self._is_due(self.config.eval.every)
        self.evaluator.reports = self.evaluator.recorded()
        if is_due and not self.evaluator.has_evaluated(self.step):
            self._evaluate()
        if self.step == 0:
            self.evaluator.require_best_metric()
        elif self.evaluator.is_best(self.step):
            self.save_checkpoint()  # again, because it was saved before its evaluation
        self.before = self.evaluator.reports if self.step == 0 else self.evaluator.recorded(0)

    def _evaluate(self) -> None:
        """Evaluate the current weights. If the run is stopping, skip it: a resume makes up for it."""
        with suppress(Interrupted):
            if self.data.eval_sets and self.sampler.drain(self.stopping.has_signal):
                self.evaluator.run(self.step)
                for report in self.evaluator.reports:
                    self.callbacks.evaluation(report)

    def _stop_if_pointless(self, stop: str | None) -> None:
        """Save and raise if the sampler or the update asked to stop, or if several batches in a row were empty."""
        is_empty, verdicts = self.empty_in_a_row >= MAX_EMPTY_BATCHES, self.empty_verdicts
        if is_empty:
            stop = f"{self.empty_in_a_row} steps in a row found no group to learn from: {why_empty(verdicts)}"
        if stop is not None:
            self.save_checkpoint()
            self.recorder.event(EventKind.STOPPED, stop)
            is_judged = verdicts[Verdict.UNJUDGED] * 2 < verdicts.total()
            raise (NothingToLearn if is_empty and is_judged else TrainingStopped)(stop)

    def state(self) -> TrainerState:
        return TrainerState(
            step=self.step,
            version=self.version,
            empty_in_a_row=self.empty_in_a_row,
            non_finite_in_a_row=self.policy.non_finite_in_a_row,
            sampler=self.sampler.state(),
            best=self.evaluator.best,
        )

    def restore(self, saved: Path | None, state: TrainerState) -> None:
        """Restore the run from `state`, and the optimizer from the checkpoint `saved` if there is one."""
        self.saver.wait_for_copy()
        if saved is not None:
            checkpoint.restore(saved, self.policy)
        self.step = self.saved_step = state.step
        self.version = state.version
        self.empty_in_a_row = state.empty_in_a_row
        self.policy.non_finite_in_a_row = state.non_finite_in_a_row
        self.evaluator.best = checkpoint.best(self.directory.checkpoints)
        self.sampler.cancel()  # before the older weights are loaded: no response may have tokens from both
        self.engine.sync_weights(self.version)
        self.sampler.restore(state.sampler, self.version)

    def read_totals(self) -> None:
        """Read the totals over the recorded steps, when the run is opened and after steps were undone."""
        self.seconds = self.recorder.total("timing_s/step")

    def save_checkpoint(self, state: TrainerState | None = None, *, in_background: bool = False) -> None:
        self.reporter.phase("saving")
        self.callbacks.save(self.saver.collect(wait=True))  # one at a time
        self.recorder.flush()  # a resume can undo records of later steps, but not add missing ones
        self.directory.require_in_place()
        self.saver.save(state or self.state(), in_background=in_background)
        self.saved_step = self.step
        self.callbacks.save(self.saver.collect(wait=not in_background))

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0
