"""Evaluation estimators from k samples per problem: pass@k, majority vote, and bootstrap confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
Bounds = tuple[float, float]  # lowest and highest
RATE: Bounds = (0.0, 1.0)
DIFFERENCE_OF_RATES: Bounds = (-1.0, 1.0)
_MAX_DRAWS_PER_BLOCK = 4_000_000  # resampled values in memory at a time (8 bytes each)


class Estimate(NamedTuple):
    """A mean over problems and its 95% confidence interval. Each field is NaN where it is undefined."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """Mean of (second model - first model) over the problems that both have, with its 95% confidence interval."""

    value: float
    low: float
    high: float
    problems: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples of which c are right: 1 - C(n-c, k) / C(n, k).

    The binomials are exact integers, so the result is rounded only once. With fewer than k judged samples, k is
    lowered to n. That underestimates pass@k slightly, but leaving the problem out would favor problems that are easy
    to judge.
    """
    assert 0 <= c <= n and n >= 1 and k >= 1, f"pass@k needs 0 <= c <= n, n >= 1 and k >= 1, got n={n}, c={c}, k={k}"
    k = min(k, n)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return 1.0 if the most common answer to one problem is right, 0.0 if it is wrong; tied answers share the vote.

    Answers are compared as text, ignoring case and surrounding whitespace: 0.5 and 1/2 are different answers. A sample
    without an answer does not vote. A problem without votes is wrong.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer.strip().casefold(), []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    winners = [float(np.mean(members)) for members in votes.values() if len(members) == most]
    return float(np.mean(winners)) if winners else 0.0


def ks(k: int) -> list[int]:
    """Return the values of k to report pass@k for: the powers of two up to k, and k itself."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def estimate(
    values_P: Sequence[float] | np.ndarray, bounds: Bounds | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the mean over problems and its 95% percentile-bootstrap interval, resampling problems.

    A single problem has no interval. If all problems have the same value, the bootstrap collapses to it. With `bounds`,
    between which all values lie, the interval is then that of `_of_equal_values`.
    """
    values = np.asarray(values_P, dtype=np.float64)
    count = len(values)
    if count < 2:
        return Estimate(float(values[0]) if count else math.nan, math.nan, math.nan)
    common = float(values[0])
    if bounds is not None and bounds[0] <= common <= bounds[1] and values.min() == values.max():
        return Estimate(common, *_of_equal_values(common, count, bounds))
    generator = np.random.default_rng(seed)
    rows = max(1, _MAX_DRAWS_PER_BLOCK // count)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    means_R = np.concatenate([values[generator.integers(count, size=(block, count))].mean(axis=1) for block in blocks])
    low, high = np.quantile(means_R, (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def _of_equal_values(value: float, count: int, bounds: Bounds) -> Bounds:
    """Return a 95% interval of the mean if all `count` values are equal, without an assumption on their distribution.

    If the mean is m < value, one value is equal to `value` with probability p <= (m - lowest) / (value - lowest), by
    Markov's inequality, and all are with p^count. The low end is the m with a bound of 2.5%; the high end mirrors
    it. For rates of 0% and 100% this is the exact interval of Clopper and Pearson, and holds for means of samples too.
    """
    lowest, highest = bounds
    share = 0.025 ** (1 / count)
    return lowest + (value - lowest) * share, highest - (highest - value) * share


def paired_difference(
    first: Mapping[str, float], second: Mapping[str, float], bounds: Bounds | None = None
) -> Difference:
    """Estimate second - first from per-problem differences, so that shared difficulty does not widen the interval.

    `bounds` are those of the differences.
    """
    common = [uid for uid in first if uid in second]
    return Difference(*estimate([second[uid] - first[uid] for uid in common], bounds), len(common))
