"""What k samples per problem say about a model: pass@k, the majority's answer, and how sure a mean over problems is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
_DRAWS_AT_ONCE = 4_000_000


class Estimate(NamedTuple):
    """A mean over problems with its 95 % interval; NaN where there is none."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """How much the second of two models is above the first, on the problems that both have."""

    value: float
    low: float
    high: float
    problems: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k samples at least one is right, unbiased from n samples with c right: 1 - C(n-c,k) / C(n,k).

    Integers as long as they need to be, and one rounding at the end. A problem with fewer than k judged samples is
    taken at as many as it has: a little too low, but leaving it out would favor the problems that are easy to judge.
    """
    assert 0 <= c <= n and n >= 1 and k >= 1, f"{c} right of {n}, {k} at a time"
    k = min(k, n)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the commonest answer to one problem is right; among equally common ones, the share that is.

    Answers are one vote if they are the same up to surrounding space and case: 0.5 and 1/2 are two. Samples without an
    answer do not vote, and a problem without votes is wrong.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer.strip().casefold(), []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    winners = [float(np.mean(members)) for members in votes.values() if len(members) == most]
    return float(np.mean(winners)) if winners else 0.0


def ks(k: int) -> list[int]:
    """The k of pass@k worth showing: the powers of two up to k, and k itself."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def estimate(values_P: Sequence[float] | np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean over problems, and the percentile bootstrap's 95 % interval over problems.

    One problem says nothing about others, so it has no interval. Where all problems have the same value the interval is
    that value: it then means only that these problems do not differ.
    """
    values = np.asarray(values_P, dtype=np.float64)
    count = len(values)
    if count < 2:
        return Estimate(float(values[0]) if count else math.nan, math.nan, math.nan)
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_AT_ONCE // count)  # bounds the memory of large sets
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    means_R = np.concatenate([values[generator.integers(count, size=(block, count))].mean(axis=1) for block in blocks])
    low, high = np.quantile(means_R, (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Difference:
    """Second minus first, problem by problem: that some are hard for both then does not widen the interval."""
    common = [uid for uid in first if uid in second]
    return Difference(*estimate([second[uid] - first[uid] for uid in common]), len(common))
