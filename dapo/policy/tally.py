"""Sums over the tokens of an update, from which its metrics are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from dapo.policy.head import HeadResult
from dapo.policy.packing import Batch
from dapo.types import Rollout, TokenStats


@dataclass(slots=True)
class Tally:
    """Sums of one update, or of one mini-batch of it. Every metric is a mean over tokens, not over micro-batches."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    loss: float = 0.0  # of one mini-batch
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gap_sum: float = 0.0  # |sampler - trainer| log-probability, over tokens of the current weights
    gap_max: float = 0.0
    gap_tokens: int = 0
    skipped: int = 0  # optimizer steps that were not finite
    stop: str | None = None
    computed: int = 0  # tokens that went through the trunk
    pairs: int = 0  # of a query and a key, in one attention head
    notes: list[str] = field(default_factory=list)
    token_stats: dict[tuple[int, int], TokenStats] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        return self.gap_sum / max(self.gap_tokens, 1)

    def count(self, batch: Batch, result: HeadResult, *, is_first: bool, record: bool) -> None:
        """Add one micro-batch. The gap is measured in the first mini-batch, token statistics are kept if `record`."""
        if not batch.rollouts:  # a filler adds only the names, because all ranks must reduce the same sums
            self.sums |= {name: self.sums[name] for name in ("entropy", *result.metrics)}
            return
        self.loss += float(result.loss)
        self.tokens += len(batch.targets_R)
        self.computed += len(batch.tokens_T)
        self.pairs += sum(family.pairs for family in batch.families)
        self.sums["entropy"] += float(result.entropy_R.sum())
        for name, values in result.metrics.items():
            self.sums[name] += float(values.sum())
        if is_first and batch.is_current_R.any():
            gap = (result.logprobs_R - batch.old_logprobs_R)[batch.is_current_R].abs()
            self.gap_sum += float(gap.sum())
            self.gap_max = max(self.gap_max, float(gap.max()))
            self.gap_tokens += len(gap)
        if record:
            logprobs, entropies = (by_rollout(batch.rollouts, v) for v in (result.logprobs_R, result.entropy_R))
            for (rollout, logprob), (_, entropy) in zip(logprobs, entropies, strict=True):
                self.token_stats[rollout.serial, rollout.index] = TokenStats(logprob, entropy)

    def add(self, part: Tally) -> None:
        """Add a mini-batch to the update."""
        for name, value in part.sums.items():
            self.sums[name] += value
        self.tokens += part.tokens
        self.computed += part.computed
        self.pairs += part.pairs
        self.gap_sum += part.gap_sum
        self.gap_max = max(self.gap_max, part.gap_max)
        self.gap_tokens += part.gap_tokens
        self.token_stats |= part.token_stats

    def metrics(self, learning_rate: float) -> dict[str, float]:
        tokens = max(self.tokens, 1)
        metrics = {name: total / tokens for name, total in self.sums.items()}
        metrics |= {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "lr": learning_rate,
            "updates": float(len(self.norms)),
            "updates/non_finite": float(self.skipped),
            "tokens/computed": float(self.computed),
        }
        if self.gap_tokens:
            metrics["logprob_gap/mean"] = self.gap
            metrics["logprob_gap/max"] = self.gap_max
        return metrics


def by_rollout(rollouts: Sequence[Rollout], values_R: Tensor) -> Iterator[tuple[Rollout, np.ndarray]]:
    """Split values per response token into one array per rollout, with 0 for tokens that an environment gave."""
    values = values_R.detach().float().cpu().numpy()
    ends = np.cumsum([rollout.sampled for rollout in rollouts])
    for rollout, part in zip(rollouts, np.split(values, ends[:-1]), strict=True):
        whole = part
        if rollout.given:
            whole = np.zeros(len(rollout), part.dtype)
            whole[rollout.is_own] = part
        yield rollout, whole
