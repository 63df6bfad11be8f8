"""Form a group from scored rollouts: shaped rewards, advantages, and the verdict (kept, or why it is dropped)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.algorithm.advantage import Advantage, group_advantages, normalized
from dapo.algorithm.overlong import LengthShaping
from dapo.algorithm.ratio import kl_k3
from dapo.errors import RewardError
from dapo.types import Group, Prompt, Rollout, Score, Verdict

GroupFilter = Callable[[Group], str]  # returns `kept`, or the reason why the group is dropped


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The options that decide a group's rewards, advantages and verdict."""

    max_response_length: int
    shaping: LengthShaping | None = None
    advantage: Advantage = normalized
    overlong_filter: bool = False
    filter_enabled: bool = True
    filter_metric: str | None = None  # None: acc if every judged score has it, else score
    group_filter: GroupFilter | None = None  # decides instead of the metric
    kl_reward_coef: float = 0.0


def form_group(
    serial: int,
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    rules: GroupRules,
    ref_logprobs: Sequence[np.ndarray] | None = None,
) -> Group:
    """Shape the rewards, compute the advantages and decide the verdict.

    `ref_logprobs` holds one float32 [L] array per rollout. It is required when `rules.kl_reward_coef` > 0.
    """
    judged = np.array([score.judged for score in scores])
    shaped = np.array([_shaped_reward(*pair, rules) for pair in zip(rollouts, scores, strict=True)])
    final = shaped
    if rules.kl_reward_coef > 0:
        assert ref_logprobs is not None, "kl_reward_coef > 0 needs the reference model's log-probabilities"
        kl = [
            kl_k3(rollout.logprobs.astype(np.float64), reference.astype(np.float64)).sum()
            for rollout, reference in zip(rollouts, ref_logprobs, strict=True)
        ]  # of the sampler from the reference; both are 0 for given tokens
        final = shaped - rules.kl_reward_coef * np.array(kl)
    cut_off = np.array([rollout.finish_reason == "length" for rollout in rollouts])
    # A cut-off rollout leaves the loss but stays in the group's mean and std.
    trains = judged & ~cut_off if rules.overlong_filter else judged
    group = Group(
        serial=serial,
        prompt=prompt,
        rollouts=tuple(rollouts),
        scores=tuple(scores),
        rewards=final,
        advantages=group_advantages(final, rules.advantage),
        trains=trains,
        verdict=Verdict.KEPT,
        ref_logprobs=None if ref_logprobs is None else tuple(ref_logprobs),
    )
    return group.with_verdict(_verdict(group, shaped, rules))


def _shaped_reward(rollout: Rollout, score: Score, rules: GroupRules) -> float:
    if score.value is None:
        return float("nan")
    if rules.shaping is None:
        return score.value
    is_cut_off = rollout.finish_reason == "length"
    return score.value + rules.shaping(score.value, rollout.sampled, rules.max_response_length, is_cut_off)


def _verdict(group: Group, shaped: np.ndarray, rules: GroupRules) -> str:
    if sum(score.judged for score in group.scores) < 2:
        return Verdict.UNJUDGED
    verdict = rules.group_filter(group) if rules.group_filter else _verdict_by_metric(group, shaped, rules)
    return Verdict.NOTHING_TO_TRAIN if verdict == Verdict.KEPT and not group.trains.any() else verdict


def _verdict_by_metric(group: Group, shaped: np.ndarray, rules: GroupRules) -> Verdict:
    if rules.filter_enabled:
        metric, values = _metric_values(group.scores, shaped, group.rewards, rules.filter_metric)
        # Compare exactly: the floating-point std of equal values need not be zero.
        if all(_is_same(value, values[0]) for value in values):
            if metric == "acc" and values[0] in (0, 1):  # it can also be a share between wrong and right
                return Verdict.ALL_RIGHT if values[0] else Verdict.ALL_WRONG
            return Verdict.NO_VARIANCE
    return Verdict.KEPT


def _is_same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))  # a named extra may be NaN; two NaNs count as the same value


def _metric_values(
    scores: Sequence[Score], shaped: np.ndarray, final: np.ndarray, metric: str | None
) -> tuple[str, list[Any]]:
    """Return the name of the filter metric and its value for each judged rollout."""
    judged = [(score, i) for i, score in enumerate(scores) if score.judged]
    has_acc = all(score.acc is not None for score, _ in judged)
    if metric is None:
        metric = "acc" if has_acc else "score"
    if metric == "score":
        return metric, [score.value for score, _ in judged]
    if metric == "seq_reward":
        return metric, [shaped[i] for _, i in judged]
    if metric == "seq_final_reward":
        return metric, [final[i] for _, i in judged]
    if metric == "acc" and has_acc:
        return metric, [score.acc for score, _ in judged]
    if all(metric in score.extras for score, _ in judged):
        return metric, [score.extras[metric] for score, _ in judged]
    extras = set.intersection(*(set(score.extras) for score, _ in judged))
    available = [*(["acc"] if has_acc else []), "score", "seq_reward", "seq_final_reward", *sorted(extras)]
    raise RewardError(
        f"algorithm.filter_groups.metric is '{metric}', but the reward does not return it; "
        f"use one of: {', '.join(available)}"
    )
