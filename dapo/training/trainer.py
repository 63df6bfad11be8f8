"""The training loop: sample, update, record, save. The same trainer serves a CPU, a GPU and a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.state import TrainerState
from dapo.cluster.assemble import assemble
from dapo.config import Config
from dapo.config.functions import CustomParts, file_digests, with_objects
from dapo.data.dataset import load_run_data
from dapo.errors import ClusterLost, ConfigError, LearnerLost, StorageError, TrainingStopped
from dapo.evaluation.evaluate import Interrupted
from dapo.model.loading import load_tokenizer
from dapo.model.tokens import token_bytes
from dapo.policy.build import model_source
from dapo.policy.protocol import UpdateResult
from dapo.policy.rules import UpdateRules
from dapo.rewards.judge import (
    RewardFunctions,
    build_judge,
    check_columns,
    columns_seen,
    function_terms,
    isolation_note,
    judge_kinds,
)
from dapo.rewards.protocol import Judge
from dapo.sampling.accounting import Sampled
from dapo.sampling.inflight import InflightSampler
from dapo.sampling.rules import group_rules
from dapo.sampling.strict import DynamicSampler
from dapo.store.database import versions
from dapo.store.trackers import require_trackers
from dapo.terminal.console import Reporter
from dapo.training import signals
from dapo.training.evaluator import Evaluator
from dapo.training.recorder import Recorder
from dapo.training.run_directory import RunDirectory
from dapo.types import EvalReport, Event, EventKind, StepReport

MAX_EMPTY_BATCHES = 3


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """The result of a finished or interrupted run; everything else is in the run directory."""

    run_dir: Path
    steps: int
    before: tuple[EvalReport, ...]  # one per set, before the first step
    after: tuple[EvalReport, ...]  # the latest evaluation, one per set
    signal: int | None  # the signal that ended the run early, after its step was finished and saved
    seconds: float  # spent on training steps, without evaluation and saving, also before a resume


class Trainer:
    """Trains as the configuration says.

    `reward` replaces `reward.use`: a Python function, a list of functions, or a mapping of functions to weights.
    `parts` replaces parts of the algorithm by functions: docs/custom-parts.md.
    """

    def __init__(
        self,
        config: Config,
        reward: RewardFunctions | None = None,
        *,
        parts: CustomParts | None = None,
        resume: bool = False,
        reporter: Reporter | None = None,
        recipe: str | None = None,  # the recipe's name, which is recorded in the database
    ) -> None:
        if reward is not None:
            config = _with_function(config, reward)
        if parts is not None:
            config = with_objects(config, parts)
        for collect in (UpdateRules.of, group_rules):  # errors in the parts show here
            collect(config, parts)
        self.config, self.custom = config, parts
        self.reporter = reporter or Reporter()
        self.step, self.version, self.saved_step = 0, 0, 0
        self.empty_in_a_row = 0
        self.before: tuple[EvalReport, ...] = ()
        self.signal: int | None = None
        require_trackers(config.run.trackers)
        self.directory = RunDirectory(config, resume=resume)  # locked from here on
        with ExitStack() as undo:  # if anything below fails, release what was acquired before it
            undo.callback(self.directory.abandon)
            self.recorder = Recorder(self.directory, self.reporter)
            undo.callback(self.recorder.close)
            judge = None if config.cluster.reward_workers else build_judge(config.reward, reward)
            if judge is not None:
                undo.callback(judge.close)
            # Errors in data or model show here, before anything is written.
            self._build(judge)
            undo.callback(self.engine.close)
            if self.directory.state:
                self._restore(self.directory.saved, self.directory.state)
            self.recorder.open(
                config, _environment() | file_digests(config) | ({"recipe": recipe} if recipe else {}), self.step
            )
            self.seconds = self.recorder.training_seconds()
            for note in self.data.notes:
                self.recorder.event(EventKind.DATA, note)
            if judge is not None and (note := isolation_note(config.reward)):
                self.recorder.event(EventKind.SANDBOX, note)
            if plan := self.policy.memory_plan(self.engine.cache_bytes):
                self.recorder.event(EventKind.PLAN, plan)
            undo.pop_all()
        # The state after the last whole step, which is saved if the cluster is lost in the middle of the next one.
        self.last_state = self.first_state = self._state()

    def run(self) -> RunResult:
        """Train up to `run.steps`, or to the end of the step in which a signal asks to stop; then close everything."""
        with closing(self), signals.handled(self._ask_to_stop), self.reporter.training(self.config, self.step):
            self._evaluate_first()
            while not self.is_finished and self.signal is None:
                with self._faults_handled():
                    self.train_step()
                    if self.is_finished or self._is_due(self.config.eval.every):
                        self._evaluate()
                    if self.evaluator.is_best(self.step) or self._is_due(self.config.run.save_every):
                        self._save()
            if self.step > self.saved_step:
                self._save()
            kind = EventKind.FINISHED if self.is_finished else EventKind.INTERRUPTED
            self.recorder.event(kind, f"after step {self.step}")
        seconds, reports = self.seconds, self.evaluator.reports
        return RunResult(self.config.run_dir, self.step, self.before, reports, self.signal, seconds)

    def train_step(self) -> None:
        """Run one step: Prompt -> Rollout -> Score -> Group -> Batch -> loss -> update -> report."""
        start, step = time.perf_counter(), self.step + 1
        sampled = self.sampler.fill(step, self.version)
        updating = time.perf_counter()
        self.reporter.phase("training")
        if self.policy.needs_engine_memory and not self.sampler.pending:
            self.engine.suspend()  # only if nothing is in flight
        update = self.policy.update(sampled.batch, step, self.version)
        if update.updates > 0:
            self.version += 1
            self.engine.sync_weights(self.version)
        end = time.perf_counter()
        metrics = _metrics(sampled, update, train=end - updating, total=end - start)
        metrics |= self.engine.metrics() | self.policy.efficiency(sampled.batch, update, end - updating)
        notes = tuple(Event(EventKind.MEMORY, note, step) for note in update.notes)
        self.recorder.step(StepReport(step, metrics, sampled.groups, update.token_stats, (*sampled.events, *notes)))
        self.step, self.seconds = step, self.seconds + end - start
        found_nothing = not sampled.batch and not self.sampler.carried
        self.empty_in_a_row = self.empty_in_a_row + 1 if found_nothing else 0
        self.last_state = self._state()
        self._stop_if_pointless(sampled.stop or update.stop)

    @property
    def is_finished(self) -> bool:
        return self.step >= self.config.run.steps

    def close(self) -> None:
        with ExitStack() as stack:  # closes in reverse order; if one fails, the others are closed all the same
            stack.callback(self.directory.close)
            stack.callback(self.recorder.close)
            stack.callback(self.judge.close)
            stack.callback(self.engine.close)

    def _build(self, judge: Judge | None) -> None:
        """Build data, policy, engine, judge and sampler, with the weights of the checkpoint if there is one."""
        config, saved = self.config, self.directory.saved
        # Load the data before the weights, so that its errors show at once.
        tokenizer = load_tokenizer(model_source(config, saved).path)
        if config.rollout.stop:
            token_bytes(tokenizer)  # raises if the engine could not compare its tokens with a text
        kinds = judge_kinds(config.reward, judge)
        self.data = load_run_data(config, tokenizer, columns_seen(kinds))
        check_columns(kinds, self.data.columns())
        self.parts = assemble(config, saved, self.recorder.event, self._is_stopping, self.custom)
        self.policy, self.engine = self.parts.policy, self.parts.engine
        self.tokenizer = self.parts.tokenizer
        judge = judge or self.parts.judge
        assert judge is not None
        self.judge = judge
        sets = self.data.eval_sets
        self.evaluator = Evaluator(config, sets, self.engine, judge, self.recorder, self._is_stopping)
        build_sampler = InflightSampler if config.rollout.mode == "inflight" else DynamicSampler
        self.sampler = build_sampler(
            config,
            self.engine,
            judge,
            self.data.stream,
            reference=self.policy.reference_logprobs if config.needs_reference else None,
            on_group=self.reporter.group,
            on_progress=self.reporter.responses,
            parts=self.custom,
        )

    def _evaluate_first(self) -> None:
        """Evaluate before the first step. On resume take what is recorded, and evaluate only if that is missing."""
        is_due = self.step == 0 or self._is_due(self.config.eval.every)
        if is_due and not self.recorder.evaluations(self.step):
            self._evaluate()
        else:
            self.evaluator.reports = self.recorder.evaluations()
        self.before = self.evaluator.reports if self.step == 0 else self.recorder.evaluations(0)

    def _evaluate(self) -> None:
        """Evaluate the current weights, or leave it if the run is stopping: a resume makes up for it."""
        with suppress(Interrupted):
            if self.data.eval_sets and self.sampler.drain(self._is_stopping):
                self.evaluator.run(self.step)

    def _is_stopping(self) -> bool:
        return self.signal is not None

    def _stop_if_pointless(self, stop: str | None) -> None:
        """Save and raise if the sampler or the update asked to stop, or if several batches in a row were empty."""
        if self.empty_in_a_row >= MAX_EMPTY_BATCHES:
            stop = (
                f"{MAX_EMPTY_BATCHES} steps in a row found no group to learn from: within each group all responses are "
                "right, all are wrong, or all have the same score; the task is too hard or too easy for this model, or "
                "the reward is wrong"
            )
        if stop is not None:
            self._save()
            self.recorder.event(EventKind.STOPPED, stop)
            raise TrainingStopped(stop)

    @contextmanager
    def _faults_handled(self) -> Iterator[None]:
        """Recover from a lost learner. Before a fault that ends the run, save and record what is still possible."""
        try:
            yield
        except LearnerLost as lost:
            self._restart_from_checkpoint(lost)
        except StorageError as fault:
            with suppress(StorageError):  # the database may be on the same failing disk
                self.recorder.event(EventKind.STOPPED, str(fault))
            raise
        except ClusterLost as lost:  # the learner still has the weights of the last whole step
            if self.step > self.saved_step:
                self._save(self.last_state)
            self.recorder.event(EventKind.STOPPED, str(lost))
            raise

    def _restart_from_checkpoint(self, lost: LearnerLost) -> None:
        """Restart all learners and everything else from the newest checkpoint, because the weights are lost."""
        saved = checkpoint.newest(self.directory.checkpoints)
        try:
            self.parts.restart(lost, saved)
        except ClusterLost as end:
            self.recorder.event(EventKind.STOPPED, str(end))
            raise
        self._restore(saved, checkpoint.read_state(saved) if saved else self.first_state)
        self.engine.metrics()  # discard the metrics of the undone steps
        undone = self.recorder.rewind(self.step)
        self.last_state = self._state()
        message = f"{lost}; all learners start again from step {self.step}, {undone} steps undone"
        self.recorder.event(EventKind.LEARNERS, message)

    def _state(self) -> TrainerState:
        return TrainerState(
            step=self.step,
            version=self.version,
            empty_in_a_row=self.empty_in_a_row,
            non_finite_in_a_row=self.policy.non_finite_in_a_row,
            sampler=self.sampler.state(),
            best=self.evaluator.best,
        )

    def _restore(self, saved: Path | None, state: TrainerState) -> None:
        """Restore the run from `state`, and the optimizer from the checkpoint `saved` if there is one."""
        if saved is not None:
            checkpoint.restore(saved, self.policy)
        self.step = self.saved_step = state.step
        self.version = state.version
        self.empty_in_a_row = state.empty_in_a_row
        self.policy.non_finite_in_a_row = state.non_finite_in_a_row
        self.evaluator.best = checkpoint.best(self.directory.checkpoints)
        self.engine.sync_weights(self.version)
        self.sampler.restore(state.sampler, self.version)

    def _save(self, state: TrainerState | None = None) -> None:
        self.reporter.phase("saving")
        self.recorder.flush()  # a resume can undo steps after the checkpoint, but cannot invent missing ones
        self.directory.require_in_place()
        checkpoint.save(self.directory.checkpoints, state or self._state(), self.policy, self.tokenizer)
        self.saved_step = self.step

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _ask_to_stop(self, number: int, _: Any) -> None:
        """Stop after the current step and save on the first signal; stop at once on the second."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        self.reporter.stopping()


def _with_function(config: Config, reward: RewardFunctions) -> Config:
    """Return the configuration with `python:NAME` as the reward, which says that a resume needs the function again."""
    if config.cluster.reward_workers:
        raise ConfigError(
            "cluster.reward_workers: a reward that is given as a Python function runs in the trainer's process; name "
            "it as path/to/file.py:function in reward.use, or leave reward_workers out"
        )
    weights = {f"python:{name}": weight for name, _, weight in function_terms(reward)}
    use = next(iter(weights)) if callable(reward) else weights
    return config.model_copy(update={"reward": config.reward.model_copy(update={"use": use})})


def _environment() -> dict[str, str]:
    """Return what the bits of a run on a CPU depend on besides its configuration. A resume reports what differs."""
    return versions() | {
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _metrics(sampled: Sampled, update: UpdateResult, *, train: float, total: float) -> dict[str, float]:
    generate, reward = sampled.generate_seconds, sampled.reward_seconds
    return {
        **sampled.metrics(),
        **update.metrics,
        "timing_s/generate": generate,
        "timing_s/reward": reward,
        "timing_s/train": train,
        "timing_s/step": total,
        "throughput/generated_tokens_per_s": sampled.tokens["tokens/generated"] / max(generate, 1e-9),
        "throughput/trained_tokens_per_s": sampled.tokens["tokens/trained"] / max(train, 1e-9),
        "time_share/generate": generate / max(total, 1e-9),
        "time_share/reward": reward / max(total, 1e-9),
        "time_share/train": train / max(total, 1e-9),
    }
