"""The training loop: sample, update, record, save. The same trainer serves a CPU, a GPU and a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.state import Best, TrainerState
from dapo.config import Config
from dapo.data.dataset import load_eval_sets, load_train_stream
from dapo.errors import CheckpointError, ClusterLost, ConfigError, LearnerLost, StorageError, TrainingStopped
from dapo.evaluation.evaluate import evaluate
from dapo.model.loading import load_tokenizer
from dapo.policy.build import model_source
from dapo.policy.protocol import UpdateResult
from dapo.rewards.judge import build_judge, isolation_note
from dapo.rewards.protocol import Judge
from dapo.sampling.accounting import Sampled
from dapo.sampling.inflight import InflightSampler
from dapo.sampling.strict import DynamicSampler
from dapo.store.database import versions
from dapo.store.trackers import Trackers, require_trackers
from dapo.terminal.console import Reporter
from dapo.training import signals
from dapo.training.assemble import assemble
from dapo.training.run_directory import RunDirectory
from dapo.types import EvalReport, Event, SamplingParams, StepReport

MAX_EMPTY_BATCHES = 3


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """The result of a finished or interrupted run; everything else is in the run directory."""

    run_dir: Path
    steps: int
    before: tuple[EvalReport, ...]  # one per set, before the first step; empty for a resumed run
    after: tuple[EvalReport, ...]  # the latest evaluation, one per set
    signal: int | None  # the signal that ended the run early, after its step was finished and saved
    seconds: float  # spent on training steps, without evaluation and saving


class Trainer:
    """Trains as the configuration says. `reward`, a plain Python function, replaces `reward.use`."""

    def __init__(
        self,
        config: Config,
        reward: Callable[..., Any] | None = None,
        *,
        resume: bool = False,
        reporter: Reporter | None = None,
        recipe: str | None = None,
    ) -> None:
        if reward is not None:
            config = _with_function(config, reward)
        self.config = config
        self.reporter = reporter or Reporter()
        self.recipe = recipe  # the name of the recipe, recorded in the database
        self.run_dir = config.run_dir
        require_trackers(config.run.trackers)
        self.directory = RunDirectory(config, resume=resume)  # locked from here on
        self.step, self.version, self.empty_in_a_row = 0, 0, 0
        self.saved_step = 0
        self.best: Best | None = None
        self.signal: int | None = None
        self.is_open = False
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self.recording: Future[None] | None = None
        with ExitStack() as undo:  # if anything below fails, release what was acquired before it
            undo.callback(self.directory.abandon)
            own_judge = None if config.cluster.reward_workers else build_judge(config.reward, reward)
            if own_judge is not None:
                undo.callback(own_judge.close)
            # Errors in model or data show here, before anything is written.
            self._build(self.directory.saved, own_judge)
            undo.callback(self.engine.close)
            if self.directory.saved and self.directory.state:
                self._restore(self.directory.saved, self.directory.state)
            about = versions() if self.recipe is None else {**versions(), "recipe": self.recipe}
            self.database = self.directory.begin(about)
            undo.callback(self.database.close)
            self.is_open = True
            for note in self.notes:
                self._event("data", note)
            if own_judge is not None and (note := isolation_note(config.reward)):
                self._event("sandbox", note)
            if plan := self.policy.memory_plan(self.parts.cache_bytes):
                self._event("plan", plan)
            if resume:
                undone = self.database.rewind(self.step)
                # `rewind` has recorded this event already, so it is only shown here.
                self.reporter.event(Event("resumed", f"after step {self.step}, {undone} later steps undone", self.step))
            self.trackers = Trackers(config, self.step, on_failure=lambda message: self._event("tracker", message))
            undo.pop_all()
        self.before: tuple[EvalReport, ...] = ()
        self.latest: tuple[EvalReport, ...] = ()
        # The state after the last whole step, which is saved if the cluster is lost in the middle of the next one.
        self.last_state = self.first_state = self._state()
        self.seconds = 0.0

    def run(self) -> RunResult:
        """Train up to `run.steps`, or to the end of the step in which a signal asks to stop; then close everything."""
        with closing(self), signals.handled(self._ask_to_stop), self.reporter.training(self.config, self.step):
            if self.step == 0:
                self.before = self.latest = self._evaluate()
                self._best_metric_value()  # raises here, before hours of training, if there is no such metric
            while self.step < self.config.run.steps and self.signal is None:
                try:
                    self._train_evaluate_save()
                except LearnerLost as lost:
                    self._restart_from_checkpoint(lost)
                except StorageError as fault:
                    with suppress(StorageError):  # the database may be on the same failing disk
                        self._event("stopped", str(fault))
                    raise
                except ClusterLost as lost:  # the learner still has the weights of the last whole step
                    if self.step > self.saved_step:
                        self._save(self.last_state)
                    self._event("stopped", str(lost))
                    raise
            if self.step > self.saved_step:
                self._save()
            is_finished = self.step >= self.config.run.steps
            self._event("finished" if is_finished else "interrupted", f"after step {self.step}")
        return RunResult(self.run_dir, self.step, self.before, self.latest, self.signal, self.seconds)

    def _train_evaluate_save(self) -> None:
        self.train_step()
        is_finished = self.step >= self.config.run.steps
        if is_finished or self._is_due(self.config.eval.every):
            self.latest = self._evaluate()
        if self._is_best() or self._is_due(self.config.run.save_every):
            self._save()

    def _restart_from_checkpoint(self, lost: LearnerLost) -> None:
        """Restart all learners and everything else from the newest checkpoint, because the weights are lost."""
        saved = checkpoint.newest(self.directory.checkpoints)
        try:
            self.parts.restart(lost, saved)
        except ClusterLost as end:
            self._event("stopped", str(end))
            raise
        self.engine.cancel(list(self.sampler.pending))
        self.engine.figures()  # discard the metrics of the undone steps
        self.sampler = self._new_sampler()
        self._restore(saved, checkpoint.read_state(saved) if saved else self.first_state)
        self._wait_for_records()
        undone = self.database.rewind(self.step)
        self.last_state = self._state()
        self._event("learners", f"{lost}; all learners start again from step {self.step}, {undone} steps undone")

    def close(self) -> None:
        with ExitStack() as stack:  # closes in reverse order; if one fails, the others are closed all the same
            stack.callback(self.directory.close)
            stack.callback(self.database.close)
            stack.callback(self.writer.shutdown)
            stack.callback(self._wait_for_records)
            stack.callback(self.trackers.close)
            stack.callback(self.judge.close)
            stack.callback(self.engine.close)

    def _record(self, report: StepReport) -> None:
        """Record a step in the background, so that the next step's sampling does not wait for the disk.

        Every other write to the database waits for it, which keeps the order.
        """
        self._wait_for_records()
        self.directory.require_in_place()
        self.recording = self.writer.submit(self.database.record_step, report)

    def _wait_for_records(self) -> None:
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.result()

    def train_step(self) -> None:
        """Run one step: Prompt -> Rollout -> Score -> Group -> Batch -> loss -> update -> report."""
        start = time.perf_counter()
        step = self.step + 1
        sampled = self.sampler.fill(step, self.version)
        found_nothing = not sampled.batch and not self.sampler.carried
        self.empty_in_a_row = self.empty_in_a_row + 1 if found_nothing else 0
        updating = time.perf_counter()
        self.reporter.phase("training")
        if self.policy.needs_cache and not self.sampler.pending:
            self.parts.release_cache()  # lend the sampler's memory to the update; only if nothing is in flight
        update = self.policy.update(sampled.batch, step, self.version)
        if update.metrics["updates"] > 0:
            self.version += 1
            self.engine.sync_weights(self.version)
        end = time.perf_counter()
        self.seconds += end - start
        metrics = _metrics(sampled, update, train=end - updating, total=end - start)
        metrics |= self.engine.figures() | self.policy.efficiency(sampled.batch, update, end - updating)
        notes = tuple(Event("memory", note, step) for note in update.notes)
        report = StepReport(step, metrics, sampled.groups, update.token_stats, (*sampled.events, *notes))
        self._record(report)
        self.step = step
        self.last_state = self._state()
        self.reporter.step(report)
        self.trackers.step(report)
        stop = sampled.stop or update.stop
        if self.empty_in_a_row >= MAX_EMPTY_BATCHES:
            stop = (
                f"{MAX_EMPTY_BATCHES} steps in a row found no group to learn from: within each group all responses are "
                "right, all are wrong, or all have the same score; the task is too hard or too easy for this model, or "
                "the reward is wrong"
            )
        if stop is not None:
            self._save()
            self._event("stopped", stop)
            raise TrainingStopped(stop)

    def _evaluate(self) -> tuple[EvalReport, ...]:
        options = self.config.eval
        params = SamplingParams(options.temperature, options.top_p, options.top_k, self.config.data.max_response_length)
        reports = []
        if self.eval_sets:
            self.sampler.drain()  # the engine uses one set of sampling parameters at a time
        for name, prompts in self.eval_sets.items():
            report = evaluate(
                self.engine, self.judge, prompts, options.k, params, self.step, name,
                on_sample=lambda done, total, name=name: self.reporter.phase(f"evaluating {name}: {done} of {total}"),
            )  # fmt: skip
            self._wait_for_records()
            self.database.record_eval(report)
            self.reporter.evaluation(report)
            self.trackers.evaluation(report)
            reports.append(report)
        self.engine.figures()  # discard the evaluation's share, so that the next step does not count it
        return tuple(reports)

    def _is_best(self) -> bool:
        """Return whether this step was evaluated and is the best so far by eval.best_metric; if so, remember it."""
        value = self._best_metric_value()
        if value is None or not math.isfinite(value) or self.latest[0].step != self.step:
            return False
        if self.best is not None and value <= self.best.value:
            return False
        self.best = Best(self.step, str(self.config.eval.best_metric), value)
        return True

    def _best_metric_value(self) -> float | None:
        """Return the value of eval.best_metric in the latest evaluation; None if the option is not set."""
        name = self.config.eval.best_metric
        if name is None or not self.latest:
            return None
        metrics = {f"{report.name}/{key}": value for report in self.latest for key, value in report.metrics.items()}
        if name not in metrics:
            raise ConfigError(f"eval.best_metric: there is no '{name}'; the metrics are: {', '.join(metrics)}")
        return metrics[name]

    def _state(self) -> TrainerState:
        return TrainerState(
            step=self.step,
            version=self.version,
            positions=list(self.stream.positions),
            next_serial=self.sampler.next_serial,
            recent=list(self.sampler.recent),
            data_digest=self.stream.digest(),
            empty_in_a_row=self.empty_in_a_row,
            non_finite_in_a_row=self.policy.non_finite_in_a_row,
            considered=self.sampler.ledger.considered,
            ledger=self.sampler.ledger.state(),
            carried=self.sampler.carried,
            pending={serial: group.prompt for serial, group in self.sampler.pending.items()},
            best=self.best,
        )

    def _save(self, state: TrainerState | None = None) -> None:
        self.reporter.phase("saving")
        self._wait_for_records()  # a resume can undo steps after the checkpoint, but cannot invent missing ones
        self.directory.require_in_place()
        state = state or self._state()
        checkpoint.save(self.directory.checkpoints, state, self.policy, self.tokenizer)
        self.saved_step = self.step

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    def _event(self, kind: str, message: str) -> None:
        event = Event(kind, message, self.step)
        if self.is_open:
            self._wait_for_records()
            self.database.record_event(event)
        self.reporter.event(event)

    def _build(self, saved: Path | None, own_judge: Judge | None) -> None:
        """Build data, policy, engine, judge and sampler, with the weights of the checkpoint if there is one."""
        config = self.config
        # Load the data before the weights, so that its errors show at once.
        self._load_data(load_tokenizer(model_source(config, saved).path))
        self.parts = assemble(config, saved, self._event, lambda: self.signal is not None)
        self.policy, self.engine = self.parts.policy, self.parts.engine
        self.tokenizer, self.stop_ids = self.parts.tokenizer, self.parts.stop_ids
        judge = own_judge or self.parts.judge
        assert judge is not None
        self.judge = judge
        self.sampler = self._new_sampler()

    def _new_sampler(self) -> DynamicSampler:
        config = self.config
        build_sampler = InflightSampler if config.rollout.mode == "inflight" else DynamicSampler
        return build_sampler(
            config,
            self.engine,
            self.judge,
            self.stream,
            reference=self.policy.reference_logprobs if config.needs_reference else None,
            on_group=self.reporter.group,
            on_progress=self.reporter.responses,
        )

    def _load_data(self, tokenizer: PreTrainedTokenizerBase) -> None:
        config, notes = self.config, []
        sets = load_eval_sets(config, tokenizer, notes)
        # Evaluation questions are never trained on, even if this run does not evaluate.
        held_out = [prompt for prompts in sets.values() for prompt in prompts]
        self.eval_sets = sets if config.eval.k > 0 else {}
        self.stream = load_train_stream(config, tokenizer, held_out)
        self.notes = (*self.stream.notes, *notes)
        if config.eval.k > 0 and not self.eval_sets:
            self.eval_sets = {_stem(config.data.train[0].path): self.stream.questions()}

    def _restore(self, saved: Path | None, state: TrainerState) -> None:
        """Restore the run from `state`, and the optimizer from the checkpoint `saved` if there is one."""
        if state.data_digest != self.stream.digest():
            raise CheckpointError(
                f"data.train: the questions are not those that {self.run_dir} was trained on so far; restore the "
                "files, or choose another run.name"
            )
        if saved is not None:
            checkpoint.restore(saved, self.policy)
        self.step, self.version = state.step, state.version
        self.saved_step = state.step
        self.empty_in_a_row = state.empty_in_a_row
        self.policy.non_finite_in_a_row = state.non_finite_in_a_row
        self.best = checkpoint.best(self.directory.checkpoints)
        self.stream.positions = list(state.positions)
        self.sampler.ledger.restore(state.ledger, state.considered)
        self.sampler.next_serial = state.next_serial
        self.sampler.recent.extend(state.recent)
        self.sampler.carried = list(state.carried)
        self.engine.sync_weights(self.version)
        self.sampler.submit(state.pending, self.version)

    def _ask_to_stop(self, number: int, _: Any) -> None:
        """Stop after the current step and save on the first signal; stop at once on the second."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        self.reporter.stopping()


def _with_function(config: Config, reward: Callable[..., Any]) -> Config:
    """Return the configuration with `python:NAME` as the reward, which says that a resume needs the function again."""
    if config.cluster.reward_workers:
        raise ConfigError(
            "cluster.reward_workers: a reward that is given as a Python function runs in the trainer's process; name "
            "it as path/to/file.py:function in reward.use, or leave reward_workers out"
        )
    use = f"python:{getattr(reward, '__name__', type(reward).__name__)}"
    return config.model_copy(update={"reward": config.reward.model_copy(update={"use": use})})


def _stem(path: str) -> str:
    return Path(path.removeprefix("gym:")).stem


def _metrics(sampled: Sampled, update: UpdateResult, *, train: float, total: float) -> dict[str, float]:
    metrics = {**sampled.metrics(), **update.metrics}
    metrics |= {
        "timing_s/generate": sampled.generate_seconds,
        "timing_s/reward": sampled.reward_seconds,
        "timing_s/train": train,
        "timing_s/step": total,
        "throughput/generated_tokens_per_s": sampled.tokens["tokens/generated"] / max(sampled.generate_seconds, 1e-9),
        "throughput/trained_tokens_per_s": sampled.tokens["tokens/trained"] / max(train, 1e-9),
        "time_share/generate": sampled.generate_seconds / max(total, 1e-9),
        "time_share/reward": sampled.reward_seconds / max(total, 1e-9),
        "time_share/train": train / max(total, 1e-9),
    }
    return metrics
