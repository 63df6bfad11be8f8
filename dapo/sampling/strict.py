"""Strict dynamic sampling: whole rounds of groups until the batch is full, taken in submission order."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from dapo.algorithm.filtering import form_group
from dapo.checkpoint.state import SamplerState
from dapo.config import Config
from dapo.config.functions import CustomParts
from dapo.data.stream import PromptStream
from dapo.engine.protocol import Engine
from dapo.errors import RewardError
from dapo.rewards.protocol import Judge
from dapo.rewards.thought import with_reply_start
from dapo.sampling.accounting import (
    Sampled,
    count_tokens,
    differing_scores,
    has_equal_scores,
    mean_histogram,
    unjudged_message,
)
from dapo.sampling.drawing import Features, PromptDrawer
from dapo.sampling.episodes import Environment, Episodes
from dapo.sampling.round_size import groups_needed
from dapo.sampling.rules import group_rules
from dapo.system.progress import wait_visibly
from dapo.types import Drawn, Ending, Event, EventKind, Group, Outlook, Rollout, SamplingParams, Score, Verdict

SOLVED_STEPS, SOLVED_SHARE = 3, 0.8  # recent steps, and the share of groups that are all right in a solved task

Reference = Callable[[Sequence[Group]], Sequence[tuple[np.ndarray, ...]]]  # float32 [L] per rollout


@dataclass(slots=True, eq=False)
class Pending:
    """A group that is being sampled or judged."""

    drawn: Drawn
    version: int  # weight version at submission; no token of the group is older
    rollouts: list[Rollout] = field(default_factory=list)
    future: Future[list[Score]] | None = None  # set once all n rollouts are finished and given to the judge


@dataclass(slots=True, eq=False)
class StepState:
    """The state of one step while its batch is being filled."""

    version: int  # weight version at the start of the step
    number: int
    first_serial: int  # serial of the first group that this step can submit
    carried_in: int  # tokens of the groups carried from earlier steps
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)  # serials of the groups decided in this step
    generated: int = 0  # tokens of the fresh groups
    submitted: int = 0  # groups
    rounds: int = 0
    reward_seconds: float = 0.0
    stop: str | None = None
    unjudged: Counter[str] = field(default_factory=Counter)  # reason -> rollouts
    events: list[Event] = field(default_factory=list)


class DynamicSampler:
    """Drives the engine and the judge until a batch is full.

    All groups that a step submits are finished in it; `InflightSampler` overrides that. Decisions use counts and
    submission order only, never the clock or the order in which rewards arrive.
    State between steps: the drawer, carried and pending groups, the next serial, recent verdicts.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        judge: Judge,
        stream: PromptStream,
        reference: Reference | None = None,
        on_group: Callable[[Group], None] = lambda group: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_wait: Callable[[str], None] = lambda message: None,
        parts: CustomParts | None = None,
        environment: Environment | None = None,
        features: Features | None = None,
        *,
        learns_elsewhere: bool = False,  # in other processes, as under torchrun, which no option says
    ) -> None:
        self.config = config
        self.can_overlap = config.algorithm.max_staleness > 0 and config.samples_in_process and not learns_elsewhere
        self.engine = engine
        self.judge = judge
        self.episodes = Episodes(engine, judge, environment, on_wait)
        self.drawer = PromptDrawer(config, stream, features)
        self.reference = reference
        self.on_group = on_group
        self.on_progress, self.on_wait = on_progress, on_wait
        self.carried: list[Group] = []
        self.pending: dict[int, Pending] = {}  # in submission order
        self.next_serial = 0
        self.decided = 0  # groups, since the step began
        self._has_warned_of_length = self._has_warned_of_solved = False
        self._all_right: deque[tuple[int, int]] = deque(maxlen=SOLVED_STEPS)  # dropped as all right, sampled; per step
        self.recent: deque[bool] = deque(maxlen=4 * config.gen_batch_size)  # kept or not, for the keep rate
        self.rules = group_rules(config, parts)
        self.params = SamplingParams(
            config.rollout.temperature, max_tokens=config.data.max_response_length, stop=config.rollout.stop
        )

    def fill(self, number: int, version: int) -> Sampled:
        """Sample until `train_batch_size` groups are kept or the rounds are used up, and return the batch."""
        start = time.perf_counter()
        self.decided = 0
        step = StepState(version, number, self.next_serial, carried_in=sum(group.tokens for group in self.carried))
        self._take_carried(step)
        self._collect(step)
        size = self._batch_size(step)
        batch, surplus = step.kept[:size], step.kept[size:]
        if len(batch) < self.config.data.train_batch_size:
            batch, surplus = self._on_exhausted(step, batch)
        self._carry_over(step, surplus, updates=bool(batch))
        batch = self._with_reference(self._weighted(batch))
        return self._result(step, batch, time.perf_counter() - start)

    def state(self) -> SamplerState:
        return SamplerState(
            drawer=self.drawer.state(),
            next_serial=self.next_serial,
            recent=list(self.recent),
            carried=self.carried,
            pending={serial: group.drawn for serial, group in self.pending.items()},
        )

    def cancel(self) -> None:
        """Cancel all groups in flight."""
        self.episodes.cancel(list(self.pending))
        self.pending = {}

    def restore(self, state: SamplerState, version: int) -> None:
        """Continue from `state`, with nothing in flight. Its pending groups are submitted again."""
        assert not self.pending
        self.drawer.restore(state.drawer)
        self.next_serial = state.next_serial
        self.recent = deque(state.recent, self.recent.maxlen)
        self._all_right.clear()
        self.carried = list(state.carried)
        self._submit(state.pending, version)

    def _submit(self, drawn: Mapping[int, Drawn], version: int) -> None:
        prompts = {serial: new.prompt for serial, new in drawn.items()}
        self.episodes.submit(prompts, self.config.rollout.n, self.params)
        self.pending |= {serial: Pending(new, version) for serial, new in drawn.items()}

    def drain(self, is_stopping: Callable[[], bool] = lambda: False, *, leave: int = 0) -> bool:
        """Wait until the engine has finished all but `leave` responses. An evaluation needs it idle.

        The finished groups stay in `pending` and are decided in the next step. Return False if `is_stopping` became
        true before that.
        """
        while self._unfinished_responses() > leave:
            if is_stopping():
                return False
            self._poll()
        return True

    def _take_carried(self, step: StepState) -> None:
        """Put the groups carried from earlier steps first in the batch, and drop those that are too stale."""
        for group in self.carried:
            if step.version - group.weight_version > self.config.algorithm.max_staleness:
                step.dropped.append(group.with_verdict(Verdict.STALE))
            else:
                step.kept.append(group.with_verdict(Verdict.KEPT))
        self.carried = []

    def _collect(self, step: StepState) -> None:
        """Sample in rounds until the batch is full or the step's prompts are used up, and decide every group."""
        while (size := self._next_round(step)) > 0 or self.pending:
            if size > 0:
                step.rounds += 1
                self._submit_more(step, size)
            self.drain(leave=self._tail() if size > 0 else 0)
            self._decide_finished(step)
        step.kept.sort(key=lambda group: group.serial)  # submission order

    def _batch_size(self, step: StepState) -> int:
        """Return the most groups to train on in this step."""
        return self.config.data.train_batch_size

    def _next_round(self, step: StepState) -> int:
        """Return how many prompts to submit now, besides those whose groups are still in flight.

        Without carry-over a round is always `gen_batch_size` prompts, as published. With carry-over it is just large
        enough to probably fill the batch, because every further round again waits for its longest responses. It is
        never so large that more than a quarter of a batch is expected to be left over, because those groups are trained
        on one step late. While groups are in flight, more are submitted only if these will probably not fill the batch.
        """
        missing = self.config.data.train_batch_size - len(step.kept)
        limit, size = self.config.algorithm.filter_groups.max_num_gen_batches, self.config.gen_batch_size
        if missing <= 0:
            return 0
        if self.config.algorithm.max_staleness > 0 and self.recent:
            known = missing, sum(self.recent), len(self.recent), self.config.largest_round
            if self.pending and len(self.pending) >= groups_needed(*known, confidence=0.5):
                return 0
            enough = math.ceil((missing + self.config.data.train_batch_size / 4) / self._keep_rate())
            size = min(groups_needed(*known), enough) - len(self.pending)
        return size if limit <= 0 else min(size, limit * self.config.gen_batch_size - step.submitted)

    def _tail(self) -> int:
        """Return the number of unfinished responses at which the next round may begin, because many slots are idle.

        Return 0, so that the round finishes first, in two cases: in the first round of a run, because the keep rate is
        unknown, and with engines whose responses finish in an order that depends on the clock.
        """
        return self.config.concurrent // 2 if self.can_overlap and self.recent else 0

    def _keep_rate(self) -> float:
        """Return the recent share of kept groups, with one kept group added so that it is never 0."""
        return (sum(self.recent) + 1) / (len(self.recent) + 1)

    def _submit_more(self, step: StepState, size: int) -> None:
        busy = [group.prompt.uid for group in (*step.kept, *step.dropped)]
        busy += [group.drawn.prompt.uid for group in self.pending.values()]
        self._submit(dict(enumerate(self.drawer.draw(size, busy), start=self.next_serial)), step.version)
        self.next_serial += size
        step.submitted += size

    def _unfinished(self) -> list[Pending]:
        """Return the groups with rollouts that the engine has not finished."""
        return [group for group in self.pending.values() if group.future is None]

    def _unfinished_responses(self) -> int:
        return sum(self.config.rollout.n - len(group.rollouts) for group in self.pending.values())

    def _poll(self) -> None:
        """Collect finished rollouts from the engine, and submit complete groups to the judge."""
        rollouts, n = self.episodes.poll(), self.config.rollout.n
        assert rollouts, "the engine is idle, but rollouts are missing"
        for rollout in rollouts:
            group = self.pending[rollout.serial]
            group.rollouts.append(rollout)
            if len(group.rollouts) == n:
                group.rollouts.sort(key=lambda member: member.index)
                group.future = self.episodes.score(group.drawn.prompt, group.rollouts)
        total = (self.decided + len(self.pending)) * n
        self.on_progress(total - self._unfinished_responses(), total)

    def _decide_finished(self, step: StepState) -> None:
        """Decide the finished groups in submission order, after waiting for their scores."""
        finished = [(serial, group, group.future) for serial, group in self.pending.items() if group.future]
        start = time.perf_counter()
        tags = self.config.reward.think_tags
        wait_visibly([future for _, _, future in finished], self.on_wait, lambda: "rewards")
        scores = [
            with_reply_start(group.drawn.prompt, group.rollouts, future.result(), tags) for _, group, future in finished
        ]
        step.reward_seconds += time.perf_counter() - start
        # A KL term in the reward changes the verdict, so it needs the reference model for every group here.
        # A KL term in the loss needs it only for the batch (`fill`). The reference takes whole groups, so they are
        # formed without the KL term first.
        rules = self.rules
        drafts = [
            replace(
                form_group(serial, group.drawn.prompt, group.rollouts, judged, replace(rules, kl_reward_coef=0.0)),
                chance=group.drawn.chance,
            )
            for (serial, group, _), judged in zip(finished, scores, strict=True)
        ]
        if rules.kl_reward_coef > 0:
            drafts = [
                replace(form_group(g.serial, g.prompt, g.rollouts, g.scores, rules, g.ref_logprobs), chance=g.chance)
                for g in self._with_reference(drafts)
            ]
        outlooks = [self.pending.pop(serial).drawn.outlook for serial, _, _ in finished]
        self._decide(step, drafts, outlooks)

    def _weighted(self, batch: list[Group]) -> list[Group]:
        """Weight the advantages so that the ledger does not change the objective, if `ledger.correct` asks for it."""
        if not self.config.algorithm.ledger.correct or not batch:
            return batch
        by_tokens = self.config.algorithm.loss_agg_mode == "token-mean"
        sizes = [group.trained_tokens if by_tokens else int(group.trains.sum()) for group in batch]
        weights = self.drawer.ledger.weights(batch, sizes)
        return [replace(g, advantages=weight * g.advantages) for g, weight in zip(batch, weights, strict=True)]

    def _with_reference(self, groups: list[Group]) -> list[Group]:
        """Add the reference model's log-probabilities to groups without them, if the run has a reference model."""
        without = [group for group in groups if group.ref_logprobs is None]
        if self.reference is None or not without:
            return groups
        found = dict(zip((group.serial for group in without), self.reference(without), strict=True))
        return [replace(g, ref_logprobs=found[g.serial]) if g.serial in found else g for g in groups]

    def _decide(self, step: StepState, groups: list[Group], outlooks: list[Outlook | None]) -> None:
        """Sort groups into kept and dropped ones, and record the outcome."""
        self._check_reward_works(step, groups)
        self.decided += len(groups)
        for group, outlook in zip(groups, outlooks, strict=True):
            step.fresh.add(group.serial)
            step.generated += group.tokens
            (step.kept if group.kept else step.dropped).append(group)
            self.recent.append(group.kept)
            self.drawer.record(group, outlook)
            self.on_group(group)
            step.unjudged.update(score.error for score in group.scores if score.error is not None)

    def _check_reward_works(self, step: StepState, groups: list[Group]) -> None:
        """Stop the run if the reward could not judge any of its first `gen_batch_size` groups."""
        seen = [*step.kept, *step.dropped, *groups]
        if step.first_serial > 0 or len(seen) < self.config.gen_batch_size:
            return
        if not any(score.judged for group in seen for score in group.scores):
            rollout, reason = seen[0].rollouts[0], seen[0].scores[0].error
            is_environment = rollout.turns and rollout.turns[-1]["ended"] == Ending.FAILED
            who = "the environment scored" if is_environment else "the reward judged"
            raise RewardError(f"{who} none of the first {len(seen)} groups; the first reason: {reason}")

    def _on_exhausted(self, step: StepState, kept: list[Group]) -> tuple[list[Group], list[Group]]:
        """Apply `on_exhausted` to a batch that is not full. Return the groups to train on and those to carry over."""
        rule = self.config.algorithm.filter_groups
        target = self.config.data.train_batch_size
        minimum = math.ceil(rule.min_batch_ratio * target)
        summary = (
            f"{step.rounds} round{'s' * (step.rounds != 1)} gave {len(kept)} of {target} groups with something to "
            f"learn (groups by mean acc or score: {mean_histogram([*step.kept, *step.dropped])})"
            f"{differing_scores(step.dropped)}"
        )
        if rule.on_exhausted == "raise":
            step.stop = f"step {step.number}: {summary}"
            return [], kept
        if rule.on_exhausted == "skip" and len(kept) < minimum:
            step.events.append(
                Event(EventKind.EXHAUSTED, f"{summary}; no update, groups carried over to the next step", step.number)
            )
            return [], kept
        if rule.on_exhausted == "pad" and len(kept) < minimum:
            kept = self._pad(step, kept, minimum)
        step.events.append(Event(EventKind.EXHAUSTED, f"{summary}; trained on {len(kept)}", step.number))
        return kept, []

    def _pad(self, step: StepState, kept: list[Group], minimum: int) -> list[Group]:
        """Add judged but dropped groups in submission order, up to `minimum` groups."""
        usable = [g for g in step.dropped if g.verdict not in (Verdict.UNJUDGED, Verdict.STALE) and g.trains.any()]
        padding = usable[: minimum - len(kept)]
        serials = {group.serial for group in padding}
        step.dropped = [group for group in step.dropped if group.serial not in serials]
        return [*kept, *(group.with_verdict(Verdict.PADDED) for group in padding)]

    def _carry_over(self, step: StepState, surplus: list[Group], *, updates: bool) -> None:
        """Carry surplus groups over to the next step; drop them if an update follows and no staleness is allowed."""
        if self.config.algorithm.max_staleness == 0 and updates:
            step.dropped += [group.with_verdict(Verdict.SURPLUS) for group in surplus]
        else:
            self.carried = [group.with_verdict(Verdict.CARRIED) for group in surplus]

    def _warn_of_length(self, step: StepState, batch: list[Group]) -> None:
        """Warn once if most groups teach nothing but length: the model then soon answers without thinking."""
        if self.config.reward.length_shaping == "none" or self._has_warned_of_length:
            return
        learning = [group for group in batch if group.advantages.any()]
        equal = sum(map(has_equal_scores, learning))
        if 2 * equal > len(learning):
            self._has_warned_of_length = True
            message = (
                f"in {equal} of {len(learning)} groups all scores are equal and only the length penalty differs, so "
                f"they teach nothing but length; {self._how_to_drop_equal_scores()}, or raise data.max_response_length"
            )
            step.events.append(Event(EventKind.LENGTH, message, step.number))

    def _how_to_drop_equal_scores(self) -> str:
        """Say which option drops groups whose scores are all equal."""
        if self.rules.group_filter is not None:
            return "drop such groups in algorithm.filter_groups.function"
        metric = "set algorithm.filter_groups.metric to score"
        option = metric if self.rules.filter_enabled else "set algorithm.filter_groups.enable to true"
        return f"{option} to drop such groups"

    def _warn_of_solved(self, step: StepState, batch: list[Group]) -> None:
        """Warn once if most groups of the recent steps were all right: updates on the few others can make it worse."""
        all_right = sum(group.verdict == Verdict.ALL_RIGHT for group in step.dropped)
        self._all_right.append((all_right, len(step.fresh)))
        # Without a batch, another event of the step says what was found.
        if self._has_warned_of_solved or not batch or len(self._all_right) < SOLVED_STEPS:
            return
        dropped, sampled = map(sum, zip(*self._all_right, strict=True))
        if sampled and dropped >= SOLVED_SHARE * sampled:
            self._has_warned_of_solved = True
            message = (
                f"in the last {SOLVED_STEPS} steps, {dropped} of {sampled} sampled groups were dropped because all "
                "responses were right, so the task is nearly solved; stop the run, or train on harder questions"
            )
            step.events.append(Event(EventKind.SOLVED, message, step.number))

    def _result(self, step: StepState, batch: list[Group], seconds: float) -> Sampled:
        """Assemble the result of the step, which took `seconds` in all."""
        tokens = count_tokens(batch, step.dropped, self.carried, carried_in=step.carried_in, generated=step.generated)
        if step.unjudged:
            step.events.append(Event(EventKind.UNJUDGED, unjudged_message(step.unjudged), step.number))
        self._warn_of_length(step, batch)
        self._warn_of_solved(step, batch)
        return Sampled(
            batch=tuple(batch),
            groups=tuple(sorted([*batch, *step.dropped, *self.carried], key=lambda group: group.serial)),
            fresh=frozenset(step.fresh),
            version=step.version,
            in_flight=len(self.pending),
            tokens=tokens,
            rounds=step.rounds,
            skipped=self.drawer.take_skipped(),
            generate_seconds=seconds - step.reward_seconds,
            reward_seconds=step.reward_seconds,
            environment_seconds=self.episodes.take_wait(),
            events=tuple(step.events),
            stop=step.stop,
        )
