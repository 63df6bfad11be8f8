"""Dynamic sampling: rounds of groups until the batch is full, in submission order, with every token accounted for."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from dapo.algorithm.filtering import UNJUDGED, GroupRules, form_group
from dapo.algorithm.ledger import Ledger
from dapo.config import Config
from dapo.data.stream import PromptStream
from dapo.engine.protocol import Engine
from dapo.errors import RewardError
from dapo.rewards.protocol import Judge
from dapo.types import CARRIED, KEPT, PADDED, Event, Group, Prompt, Request, Rollout, SamplingParams, Score

STALE = "stale"
SURPLUS = "surplus"

Reference = Callable[[Sequence[Group]], Sequence[tuple[np.ndarray, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One step's harvest: what to train on, every group decided on the way, and where each token went."""

    batch: tuple[Group, ...]
    groups: tuple[Group, ...]  # all of them with their final verdict for this step, the batch included
    fresh: frozenset[int]  # serials of those that were generated in this step; the others were carried in
    version: int  # of the weights that the batch will train
    in_flight: int  # groups that are being sampled or judged still
    tokens: Mapping[str, int]
    rounds: int
    skipped: int  # prompts that the ledger passed over
    generate_seconds: float
    reward_seconds: float  # spent waiting for the judge after the last response was there
    events: tuple[Event, ...]
    stop: str | None = None  # why the run cannot go on, if it cannot

    def metrics(self) -> dict[str, float]:
        """Scores, rewards and lengths are those of everything generated in this step, kept or not."""
        fresh = [group for group in self.groups if group.serial in self.fresh]
        verdicts = Counter(group.verdict for group in self.groups)
        dropped = {v: n for v, n in verdicts.items() if v not in (KEPT, PADDED, CARRIED, STALE)}
        metrics: dict[str, float] = {
            **self.tokens,
            "groups/kept": len(self.batch),
            "groups/dropped": sum(dropped.values()),
            **{f"groups/dropped/{verdict}": count for verdict, count in dropped.items()},
            "groups/carried": verdicts[CARRIED],
            "groups/stale": verdicts[STALE],
            "groups/generated": len(fresh),
            "groups/rounds": self.rounds,
            "groups/skipped": self.skipped,
            "groups/in_flight": self.in_flight,
            **_staleness_metrics(self.batch, self.version),
        }
        if fresh:
            metrics |= _rollout_metrics(fresh)
        return {name: float(value) for name, value in metrics.items()}


def _staleness_metrics(batch: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions behind the tokens are that will be trained on."""
    ages = [
        version - rollout.versions
        for group in batch
        for rollout, trains in zip(group.rollouts, group.trains, strict=True)
        if trains
    ]
    if not ages:
        return {}
    return {"staleness/mean": np.concatenate(ages).mean(), "staleness/max": max(age.max() for age in ages)}


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    lengths = np.array([len(rollout) for group in groups for rollout in group.rollouts])
    cut_off = np.array([rollout.finish_reason == "length" for group in groups for rollout in group.rollouts])
    values = np.array([score.value for group in groups for score in group.scores if score.value is not None])
    accs = np.array([score.acc for group in groups for score in group.scores if score.acc is not None])
    metrics = {
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/clip_ratio": cut_off.mean(),
        "rollouts/unjudged": len(lengths) - len(values),
    }
    if len(values):
        metrics["score/mean"] = values.mean()
        metrics["reward/mean"] = np.nanmean(np.concatenate([group.rewards for group in groups]))
    if len(values) and len(accs) == len(values):
        metrics["acc/mean"] = accs.mean()
    return metrics


@dataclass(slots=True, eq=False)
class Pending:
    """A group that is being sampled or judged."""

    prompt: Prompt
    version: int  # of the weights when it was submitted: none of its tokens can be older
    rollouts: list[Rollout] = field(default_factory=list)
    promise: Future[list[Score]] | None = None  # of the judge, once all rollouts are there


@dataclass(slots=True, eq=False)
class Step:
    """What is known while one step's batch is being filled."""

    version: int
    number: int
    first_serial: int
    carried_in: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    generated: int = 0
    submitted: int = 0
    rounds: int = 0
    skipped: int = 0
    reward_seconds: float = 0.0
    stop: str | None = None
    unjudged: Counter[str] = field(default_factory=Counter)  # reason -> rollouts
    events: list[Event] = field(default_factory=list)


class DynamicSampler:
    """Drives engine and judge. Its state between steps: stream, ledger, carried groups, counters, recent keep rate.

    Rounds are finished before anything is decided. `dapo.sampling.inflight` decides under way, over the same parts.
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
    ) -> None:
        self.config = config
        self.engine = engine
        self.judge = judge
        self.stream = stream
        self.reference = reference
        self.on_group = on_group
        self.on_progress = on_progress
        self.ledger = Ledger(config.algorithm.ledger.explore, config.run.seed)
        self.carried: list[Group] = []
        self.pending: dict[int, Pending] = {}  # in submission order
        self.next_serial = 0
        self.recent: deque[bool] = deque(maxlen=4 * config.gen_batch_size)
        self.rules = group_rules(config)
        self.params = SamplingParams(config.rollout.temperature, max_tokens=config.data.max_response_length)

    def fill(self, number: int, version: int) -> Sampled:
        """Sample until `train_batch_size` groups are kept, or the rounds are used up."""
        start = time.perf_counter()
        step = Step(version, number, self.next_serial, carried_in=sum(group.tokens for group in self.carried))
        self._take_over(step)
        self._gather(step)
        target = self.config.data.train_batch_size
        batch, surplus = step.kept[:target], step.kept[target:]
        if len(batch) < target:
            batch, surplus = self._exhausted(step, batch)
        self._put_aside(step, surplus, updates=bool(batch))
        return self._harvest(step, self._with_reference(batch), time.perf_counter() - start)

    def submit(self, prompts: Mapping[int, Prompt], version: int) -> None:
        """Have these groups sampled, by serial: new ones, or those that were under way when a checkpoint was made."""
        n = self.config.rollout.n
        self.engine.submit([Request(serial, prompt.tokens, n, self.params) for serial, prompt in prompts.items()])
        self.pending |= {serial: Pending(prompt, version) for serial, prompt in prompts.items()}

    def drain(self) -> None:
        """Let the engine finish all that it has, so that it is free for another use. What comes of it is not lost."""
        while self._unfinished():
            self._poll()

    def _take_over(self, step: Step) -> None:
        """Groups carried from earlier steps come first, unless the policy has moved on too far."""
        for group in self.carried:
            if step.version - group.weight_version > self.config.algorithm.max_staleness:
                step.dropped.append(group.with_verdict(STALE))
            else:
                step.kept.append(group.with_verdict(KEPT))
        self.carried = []

    def _gather(self, step: Step) -> None:
        target, limit = self.config.data.train_batch_size, self.config.algorithm.filter_groups.max_num_gen_batches
        while len(step.kept) < target and (limit <= 0 or step.rounds < limit):
            self._round(step, self._round_size(target - len(step.kept)))

    def _round_size(self, missing: int) -> int:
        if self.config.algorithm.max_staleness == 0 or not self.recent:
            return self.config.gen_batch_size
        return min(self.config.gen_batch_size, math.ceil(missing / self._keep_rate()))

    def _keep_rate(self) -> float:
        return (sum(self.recent) + 1) / (len(self.recent) + 1)

    def _round(self, step: Step, size: int) -> None:
        """Submit `size` prompts, have each group judged while others are sampled, decide when all are there."""
        step.rounds += 1
        self._submit_more(step, size)
        self.drain()
        self._settle(step)

    def _submit_more(self, step: Step, size: int) -> None:
        self.submit(dict(enumerate(self._draw(step, size), start=self.next_serial)), step.version)
        self.next_serial += size
        step.submitted += size

    def _unfinished(self) -> list[Pending]:
        return [group for group in self.pending.values() if group.promise is None]

    def _poll(self) -> None:
        """Take what the engine has finished, and have the groups judged that are whole."""
        rollouts, n = self.engine.poll(), self.config.rollout.n
        assert rollouts, "the engine has nothing left, but rollouts are missing"
        for rollout in rollouts:
            group = self.pending[rollout.serial]
            group.rollouts.append(rollout)
            if len(group.rollouts) == n:
                group.rollouts.sort(key=lambda member: member.index)
                group.promise = self.judge.submit(group.prompt, group.rollouts)
        self.on_progress(sum(len(group.rollouts) for group in self.pending.values()), len(self.pending) * n)

    def _settle(self, step: Step) -> None:
        """Decide the groups that are whole, in submission order, waiting for their rewards where need be."""
        promised = [(serial, group, group.promise) for serial, group in self.pending.items() if group.promise]
        waiting = time.perf_counter()
        scores = [promise.result() for _, _, promise in promised]
        step.reward_seconds += time.perf_counter() - waiting
        # A KL term in the reward needs the reference before the verdict; one in the loss only for the batch.
        rules = self.rules
        drafts = [
            form_group(serial, group.prompt, group.rollouts, judged, replace(rules, kl_reward_coef=0.0))
            for (serial, group, _), judged in zip(promised, scores, strict=True)
        ]
        if rules.kl_reward_coef > 0:
            drafts = [
                form_group(g.serial, g.prompt, g.rollouts, g.scores, rules, g.ref_logprobs)
                for g in self._with_reference(drafts)
            ]
        for serial, _, _ in promised:
            del self.pending[serial]
        self._decide(step, drafts)

    def _draw(self, step: Step, count: int) -> list[Prompt]:
        """The next prompts of the stream, less those that the ledger passes over."""
        if not self.config.algorithm.ledger.enable:
            return self.stream.take(count)
        drawn: list[Prompt] = []
        while len(drawn) < count:
            (prompt,) = self.stream.take(1)
            if self.ledger.admits(prompt.uid):
                drawn.append(prompt)
            else:
                step.skipped += 1
        return drawn

    def _with_reference(self, groups: list[Group]) -> list[Group]:
        """With the reference's log-probabilities, where there is one and they are not there yet."""
        without = [group for group in groups if group.ref_logprobs is None]
        if self.reference is None or not without:
            return groups
        found = dict(zip((group.serial for group in without), self.reference(without), strict=True))
        return [replace(g, ref_logprobs=found[g.serial]) if g.serial in found else g for g in groups]

    def _decide(self, step: Step, groups: list[Group]) -> None:
        self._check_that_something_is_judged(step, groups)
        for group in groups:
            step.fresh.add(group.serial)
            step.generated += group.tokens
            (step.kept if group.kept else step.dropped).append(group)
            self.recent.append(group.kept)
            self.ledger.record(group)
            self.on_group(group)
            step.unjudged.update(score.error for score in group.scores if score.error is not None)

    def _check_that_something_is_judged(self, step: Step, groups: list[Group]) -> None:
        """A reward that fails for all of the run's first `gen_batch_size` groups will not work for the others."""
        seen = [*step.kept, *step.dropped, *groups]
        if step.first_serial > 0 or len(seen) < self.config.gen_batch_size:
            return
        if not any(score.judged for group in seen for score in group.scores):
            reason = seen[0].scores[0].error
            raise RewardError(f"the reward judged none of the first {len(seen)} groups; the first reason: {reason}")

    def _exhausted(self, step: Step, kept: list[Group]) -> tuple[list[Group], list[Group]]:
        """The rounds are used up: what to train on, and what to set aside."""
        rule = self.config.algorithm.filter_groups
        target = self.config.data.train_batch_size
        minimum = math.ceil(rule.min_batch_ratio * target)
        story = (
            f"{step.rounds} rounds gave {len(kept)} of {target} groups with something to learn "
            f"(groups by mean acc, else score: {_histogram([*step.kept, *step.dropped])})"
        )
        if rule.on_exhausted == "raise":
            step.stop = f"step {step.number}: {story}"
            return [], kept
        if rule.on_exhausted == "skip" and len(kept) < minimum:
            step.events.append(Event("exhausted", f"{story}; no update, they wait for the next step", step.number))
            return [], kept
        if rule.on_exhausted == "pad" and len(kept) < minimum:
            kept = self._pad(step, kept, minimum)
        step.events.append(Event("exhausted", f"{story}; trained on {len(kept)}", step.number))
        return kept, []

    def _pad(self, step: Step, kept: list[Group], minimum: int) -> list[Group]:
        """Fill up with dropped groups that could be judged, in submission order."""
        fit = [g for g in step.dropped if g.verdict not in (UNJUDGED, STALE) and g.trains.any()]
        padding = fit[: minimum - len(kept)]
        serials = {group.serial for group in padding}
        step.dropped = [group for group in step.dropped if group.serial not in serials]
        return [*kept, *(group.with_verdict(PADDED) for group in padding)]

    def _put_aside(self, step: Step, surplus: list[Group], *, updates: bool) -> None:
        """Carry surplus groups over. With no staleness allowed they are dropped, unless no update makes them stale."""
        if self.config.algorithm.max_staleness == 0 and updates:
            step.dropped += [group.with_verdict(SURPLUS) for group in surplus]
        else:
            self.carried = [group.with_verdict(CARRIED) for group in surplus]

    def _harvest(self, step: Step, batch: list[Group], seconds: float) -> Sampled:
        trained = sum(group.trained_tokens for group in batch)
        tokens = {
            "tokens/carried_in": step.carried_in,
            "tokens/generated": step.generated,
            "tokens/trained": trained,
            "tokens/masked": sum(group.tokens for group in batch) - trained,
            "tokens/stale": sum(group.tokens for group in step.dropped if group.verdict == STALE),
            "tokens/cancelled": 0,
            "tokens/carried_out": sum(group.tokens for group in self.carried),
        }
        for group in step.dropped:
            if group.verdict != STALE:
                name = f"tokens/dropped/{group.verdict}"
                tokens[name] = tokens.get(name, 0) + group.tokens
        if step.unjudged:
            step.events.append(Event("unjudged", _unjudged_story(step.unjudged), step.number))
        arrived = tokens["tokens/carried_in"] + tokens["tokens/generated"]
        assert arrived == sum(tokens.values()) - arrived, f"a token is lost or counted twice: {tokens}"
        return Sampled(
            batch=tuple(batch),
            groups=tuple(sorted([*batch, *step.dropped, *self.carried], key=lambda group: group.serial)),
            fresh=frozenset(step.fresh),
            version=step.version,
            in_flight=len(self.pending),
            tokens=tokens,
            rounds=step.rounds,
            skipped=step.skipped,
            generate_seconds=seconds - step.reward_seconds,
            reward_seconds=step.reward_seconds,
            events=tuple(step.events),
            stop=step.stop,
        )


def group_rules(config: Config) -> GroupRules:
    reward = config.reward
    return GroupRules(
        max_response_length=config.data.max_response_length,
        overlong_buffer_len=reward.overlong_buffer.len if reward.length_shaping == "buffer" else 0,
        overlong_penalty_factor=reward.overlong_buffer.penalty_factor,
        target_length=reward.target_length if reward.length_shaping == "target" else 0,
        overlong_filter=config.algorithm.overlong_filter,
        filter_enabled=config.algorithm.filter_groups.enable,
        filter_metric=config.algorithm.filter_groups.metric,
        adv_norm=config.algorithm.adv_norm,
        kl_reward_coef=config.algorithm.kl_reward_coef,
    )


def _unjudged_story(reasons: Counter[str]) -> str:
    """The commonest reasons; the rest is in the database, rollout by rollout."""
    named = "; ".join(f"{count} x {reason[:200]}" for reason, count in reasons.most_common(3))
    more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    return f"{reasons.total()} rollouts could not be judged: {named}{more}"


def _histogram(groups: Sequence[Group]) -> str:
    """How many groups have which mean: of acc where there is one, else of the score."""
    means: Counter[str] = Counter()
    for group in groups:
        judged = [score for score in group.scores if score.judged]
        values = [float(s.acc) if s.acc is not None else float(s.value or 0.0) for s in judged]
        means[f"{np.mean(values):.2f}" if values else "unjudged"] += 1
    return ", ".join(f"{mean}: {count}" for mean, count in sorted(means.items()))
