"""Accounting of one step: what was sampled, where every token went, and the metrics about it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.rewards.thought import REPLY_START
from dapo.types import FLAT, METRIC, TERM, Ending, Event, Group, Score, Verdict

MAX_COMPONENTS = 50  # metrics about components of scores, per step


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The result of sampling for one step: the batch, every group decided on the way, and the token accounting."""

    batch: tuple[Group, ...]
    groups: tuple[Group, ...]  # every group of this step with its verdict, the batch included, in submission order
    fresh: frozenset[int]  # serials of the groups decided for the first time in this step; the others were carried in
    version: int  # weight version that the batch will update
    in_flight: int  # groups still being sampled or judged
    tokens: Mapping[str, int]  # see `count_tokens`
    rounds: int
    skipped: int  # prompts that the ledger did not draw
    generate_seconds: float
    reward_seconds: float  # spent waiting for the judge
    events: tuple[Event, ...]
    stop: str | None = None  # why the run has to stop, or None
    environment_seconds: float = 0.0  # spent waiting for environments; a part of `generate_seconds`

    def metrics(self) -> dict[str, float]:
        """Return the sampling metrics. Scores, rewards and lengths are over all fresh groups, kept or dropped."""
        fresh = [group for group in self.groups if group.serial in self.fresh]
        verdicts = Counter(group.verdict for group in self.groups)
        others = (Verdict.KEPT, Verdict.PADDED, Verdict.CARRIED, Verdict.STALE)
        dropped = {verdict: count for verdict, count in verdicts.items() if verdict not in others}
        metrics: dict[str, float] = {
            **self.tokens,
            "groups/kept": len(self.batch),
            "groups/equal_scores": sum(map(has_equal_scores, self.batch)),
            "groups/dropped": sum(dropped.values()),
            **{f"groups/dropped/{verdict}": count for verdict, count in dropped.items()},
            "groups/carried": verdicts[Verdict.CARRIED],
            "groups/stale": verdicts[Verdict.STALE],
            "groups/generated": len(fresh),
            "groups/rounds": self.rounds,
            "groups/skipped": self.skipped,
            "groups/in_flight": self.in_flight,
            **_staleness_metrics(self.batch, self.version),
        }
        if fresh:
            metrics |= _rollout_metrics(fresh)
            metrics |= _episode_metrics(fresh, self.environment_seconds)
        return {name: float(value) for name, value in metrics.items()}


def count_tokens(
    batch: Sequence[Group], dropped: Sequence[Group], carried: Sequence[Group], *, carried_in: int, generated: int
) -> dict[str, int]:
    """Count where the response tokens of one step went, by metric name, and assert that none is lost.

    carried_in + generated = trained + masked + dropped (by reason) + stale + carried_out

    `masked` tokens belong to rollouts of trained groups that are not part of the loss.
    """
    trained = sum(group.trained_tokens for group in batch)
    tokens = {
        "tokens/carried_in": carried_in,
        "tokens/generated": generated,
        "tokens/trained": trained,
        "tokens/masked": sum(group.tokens for group in batch) - trained,
        "tokens/stale": sum(group.tokens for group in dropped if group.verdict == Verdict.STALE),
        "tokens/carried_out": sum(group.tokens for group in carried),
    }
    for group in dropped:
        if group.verdict != Verdict.STALE:
            name = f"tokens/dropped/{group.verdict}"
            tokens[name] = tokens.get(name, 0) + group.tokens
    arrived = carried_in + generated
    assert arrived == sum(tokens.values()) - arrived, f"a token is lost or counted twice: {tokens}"
    return tokens


def has_equal_scores(group: Group) -> bool:
    """Return whether only the length penalty, or a KL term in the reward, tells the responses of a group apart."""
    return bool(group.advantages.any()) and len({score.value for score in group.scores if score.judged}) == 1


def unjudged_message(reasons: Counter[str]) -> str:
    """Name the three most common reasons. The database has the reason of every rollout."""
    named = "; ".join(f"{count} x {reason[:200]}" for reason, count in reasons.most_common(3))
    more = f"; and {len(reasons) - 3} other reason{'s' * (len(reasons) > 4)}" if len(reasons) > 3 else ""
    return f"{reasons.total()} rollout{'s' * (reasons.total() != 1)} could not be judged: {named}{more}"


_WHY_EMPTY = {
    Verdict.ALL_RIGHT: "all responses were right: the task is too easy for this model, or the reward is wrong",
    Verdict.ALL_WRONG: "all responses were wrong: the task is too hard for this model, or the reward is wrong",
    Verdict.NO_VARIANCE: "all responses had the same score: the task is too hard or too easy for this model, or the "
    "reward is wrong",
    Verdict.UNJUDGED: "fewer than two responses could be judged: the events name the reasons",
    Verdict.NOTHING_TO_TRAIN: "overlong filtering left no response to train on: all were cut off at "
    "data.max_response_length",
    Verdict.STALE: "the responses were older than algorithm.max_staleness allows",
}


def why_empty(verdicts: Counter[str]) -> str:
    """Name the most common reason why groups were dropped, and count the others."""
    if not verdicts:
        return "no group was sampled"
    (verdict, count), *others = verdicts.most_common()
    why = _WHY_EMPTY.get(Verdict(verdict)) if verdict in set(Verdict) else None
    counted = "in each of them" if not others else f"in {count} of {verdicts.total()} groups"
    more = "".join(f", {number} {other.replace('_', ' ')}" for other, number in others)
    return f"{counted} {why or f'the verdict was {verdict}'}" + (f" (others:{more[1:]})" if more else "")


def mean_histogram(groups: Iterable[Group]) -> str:
    """Count groups by their mean acc, or mean score where there is no acc: "0.00: 3, 0.33: 1"."""
    means: Counter[str] = Counter()
    for group in groups:
        judged = [score for score in group.scores if score.judged]
        values = [float(s.acc) if s.acc is not None else float(s.value or 0.0) for s in judged]
        means[f"{np.mean(values):.2f}" if values else Verdict.UNJUDGED] += 1
    return ", ".join(f"{mean}: {count}" for mean, count in sorted(means.items()))


def differing_scores(dropped: Iterable[Group]) -> str:
    """Return a sentence about groups that the filter dropped although their scores differ; empty if there are none."""
    flat = [group for group in dropped if group.verdict in FLAT]
    count = sum(len({score.value for score in group.scores if score.judged}) > 1 for group in flat)
    if not count:
        return ""
    return f"; {count} of the dropped groups differ in score: set algorithm.filter_groups.metric to score to keep them"


def _staleness_metrics(batch: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean and maximum age of the tokens to train on, in weight versions."""
    ages = [
        version - rollout.versions[rollout.is_own]
        for group in batch
        for rollout, trains in zip(group.rollouts, group.trains, strict=True)
        if trains
    ]
    if not ages:
        return {}
    return {"staleness/mean": np.concatenate(ages).mean(), "staleness/max": max(age.max() for age in ages)}


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    lengths = np.array([rollout.sampled for group in groups for rollout in group.rollouts])
    cut_off = np.array([rollout.finish_reason == "length" for group in groups for rollout in group.rollouts])
    values = np.array([score.value for group in groups for score in group.scores if score.value is not None])
    accs = np.array([score.acc for group in groups for score in group.scores if score.acc is not None])
    metrics = {
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/clip_ratio": cut_off.mean(),
        "rollouts/unjudged": len(lengths) - len(values),
    }
    metrics |= _thought_metrics(groups)
    given = [score.extras.get("gave_up") for group in groups for score in group.scores]
    reasons = Counter(reason for reason in given if isinstance(reason, str) and reason.isidentifier())
    metrics |= {f"reward/gave_up/{reason}": count for reason, count in reasons.items()}
    if len(values):
        metrics["score/mean"] = values.mean()
        metrics["reward/mean"] = np.nanmean(np.concatenate([group.rewards for group in groups]))  # NaN: unjudged
    if len(values) and len(accs) == len(values):
        metrics["acc/mean"] = accs.mean()
    return metrics | _component_metrics([score for group in groups for score in group.scores if score.judged])


def _episode_metrics(groups: Sequence[Group], wait_seconds: float) -> dict[str, float]:
    """Return metrics about turns and tools; nothing if there is no environment."""
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
    if not rollouts:
        return {}
    calls = [call for rollout in rollouts for turn in rollout.turns for call in turn["calls"]]
    return {
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "turns/exhausted": float(np.mean([r.turns[-1].get("ended") == Ending.NO_TURNS for r in rollouts])),
        "tools/calls": len(calls),
        "tools/errors": sum(bool(call["error"]) for call in calls),
        "tokens/given": sum(len(rollout) - rollout.sampled for rollout in rollouts),
        "time/environment_wait": wait_seconds,
    }


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of each component of the scores and of each metric that a reward function logged.

    A component that is missing in a score does not count there. Only the most common names are reported, because a
    reward function may invent a name for every response.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.components.items():
            found[f"{TERM}{name}/mean"].append(value)
        for name, value in score.extras.items():
            if name.startswith(METRIC) and isinstance(value, float):
                found[name].append(value)
    most_common = sorted(found, key=lambda name: (-len(found[name]), name))[:MAX_COMPONENTS]
    return {name: float(np.mean(found[name])) for name in sorted(most_common)}


def _thought_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean length and the unfinished share of the thoughts; nothing if no response has one."""
    lengths, unfinished = [], []
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            if REPLY_START in score.extras:
                start = score.extras[REPLY_START]
                # The length in tokens is estimated from the thought's share of the characters.
                share = 1.0 if start is None else start / len(rollout.text)
                lengths.append(
                    share * (len(rollout) - (rollout.given[-1][1] if rollout.given else 0))
                )  # of its last turn
                unfinished.append(start is None)
    if not lengths:
        return {}
    return {
        "thought_length/mean": float(np.mean(lengths)),
        "thought_length/unfinished_ratio": float(np.mean(unfinished)),
    }
