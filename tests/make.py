"""Short constructors of records for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.types import FinishReason, Group, Prompt, Rollout, Score


def prompt(tokens: Sequence[int] = (1, 2, 3), answer: object = 5) -> Prompt:
    return Prompt("uid", ({"role": "user", "content": "?"},), tuple(tokens), answer)


def rollout(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    serial: int = 0,
    index: int = 0,
    finish: FinishReason = "stop",
    version: int = 0,
    text: str = "",
) -> Rollout:
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    return Rollout(serial, index, np.array(tokens, np.int32), np.array(logprobs, np.float32), finish, version, text)


def group(
    values: Sequence[float | None],
    lengths: Sequence[int] | None = None,
    *,
    serial: int = 0,
    rules: GroupRules | None = None,
    accs: Sequence[float | None] | None = None,
    cut_off: Sequence[bool] | None = None,
    extras: Sequence[dict[str, object]] | None = None,
    ref_logprobs: Sequence[np.ndarray] | None = None,
) -> Group:
    """Build a group with these scores (None: unjudged) and arbitrary tokens and log-probabilities."""
    n = len(values)
    lengths = lengths or [3] * n
    finish: list[FinishReason] = ["length" if c else "stop" for c in (cut_off or [False] * n)]
    rollouts = [rollout([7] * lengths[i], serial=serial, index=i, finish=finish[i]) for i in range(n)]
    scores = [
        Score(None, error="no")
        if value is None
        else Score(value, acc=accs[i] if accs else None, extras=extras[i] if extras else {})
        for i, value in enumerate(values)
    ]
    return form_group(serial, prompt(), rollouts, scores, rules or GroupRules(100), ref_logprobs)


class Scripted:
    """A judge that calls a function of prompt and rollout at once."""

    def __init__(self, judge: Callable[[Prompt, Rollout], Score]) -> None:
        self.judge = judge

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_result([self.judge(prompt, rollout) for rollout in rollouts])
        return future

    def close(self) -> None: ...


def judge_by(pattern: Sequence[str]) -> Callable[[Prompt, Rollout], Score]:
    """Return a judge's function: group after group is mixed, flat, unjudged or partly judged, as the pattern says."""

    def judge(prompt: Prompt, rollout: Rollout) -> Score:
        kind = pattern[rollout.serial % len(pattern)]
        if kind == "unjudged" or (kind == "partly_judged" and rollout.index == 1):
            return Score(None, error="no")
        return Score(float(rollout.index) if kind != "flat" else 1.0)

    return judge
