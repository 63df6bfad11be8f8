"""Paired differences of two models that were trained with several seeds and asked the same questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Cells = Mapping[tuple[int, str], float]  # (seed, question) -> value

_LEVEL = 0.95
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


class Contrast(NamedTuple):
    """Mean of (second - first), its 95% interval, its two-sided p-value (each NaN if undefined), and the seeds."""

    value: float
    low: float
    high: float
    p: float
    seeds: int  # with a question that both have


def contrast(first: Cells, second: Cells) -> Contrast:
    """Estimate second - first from the seeds and questions that both have.

    Differences of the same seed and differences of the same question depend on each other, so the variance is clustered
    by both: V = V_seed + V_question - V_cell, where V_seed and V_question are each at least V_cell. Student's t with
    Satterthwaite's degrees of freedom allows for the few seeds. A single seed is clustered by question alone: the
    interval then says nothing about other seeds, so there is no p-value.

    The p-value is stricter than the interval. Three seeds can agree by chance, and Satterthwaite's formula then finds
    hundreds of degrees of freedom. A correction for many arms tests at small p-values, where inflated degrees of
    freedom do the most harm: with nine arms, 15 to 23% of simulated ablations called an arm different although none
    was. So p has at most as many degrees of freedom as the seeds have.
    """
    common = [cell for cell in first if cell in second]
    seeds = len({seed for seed, _ in common})
    values_N = np.array([second[cell] - first[cell] for cell in common], dtype=np.float64)
    if len(values_N) < 2:
        return Contrast(float(values_N[0]) if len(values_N) else math.nan, math.nan, math.nan, math.nan, seeds)
    if values_N.min() == values_N.max():  # the spread is not known; rounding could give it a variance above zero
        value = float(values_N[0])
        return Contrast(value, value, value, 1.0 if value == 0.0 and seeds > 1 else math.nan, seeds)
    mean, errors_N = float(values_N.mean()), values_N - values_N.mean()
    alone, most = _clustered(errors_N, range(len(common)))
    variance, squares = -alone, alone**2 / most  # of Satterthwaite's formula
    fewest = most
    for side in (0, 1):
        part, freedom = _clustered(errors_N, [cell[side] for cell in common])
        if freedom > 0 and part > alone:
            fewest = min(fewest, freedom)
        else:
            part, freedom = alone, most
        variance, squares = variance + part, squares + part**2 / freedom
    freedom = max(variance**2 / squares, fewest)
    width = math.sqrt(variance)
    reach = width * _student_quantile(freedom)
    p = 1.0 - student_within(abs(mean) / width, min(freedom, seeds - 1)) if seeds > 1 else math.nan
    return Contrast(mean, mean - reach, mean + reach, p, seeds)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, which bound the chance of any false finding among all comparisons.

    A NaN stays one, and does not count as a comparison.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = largest
    return adjusted


def clearest_needed(seeds: int, comparisons: int, level: float) -> float:
    """Return the |mean| / standard error below which Holm's correction finds no difference among the comparisons.

    It compares the smallest of their p-values with level / comparisons. With several seeds, p has at most one degree of
    freedom fewer than there are seeds.
    """
    assert seeds > 1
    return _student_quantile(seeds - 1, 1.0 - level / comparisons)


def student_within(t: float, freedom: float) -> float:
    """Return P(|T| <= t) for Student's t with `freedom` >= 1 degrees of freedom.

    With T = sqrt(freedom) tan(x), the density is proportional to cos(x)^(freedom - 1), which is smooth.
    """
    end = math.atan(t / math.sqrt(freedom))
    angles = 0.5 * end * (_NODES + 1.0)
    area = 0.5 * end * float(_WEIGHTS @ np.exp((freedom - 1.0) * np.log(np.cos(angles))))
    log_total = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2) + 0.5 * math.log(math.pi) - math.log(2.0)
    return min(1.0, area / math.exp(log_total))


def _student_quantile(freedom: float, share: float = _LEVEL) -> float:
    """Return t with P(|T| <= t) = share."""
    low, high = 0.0, 20.0  # 12.7 for 95% with one degree of freedom
    while student_within(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_within(middle, freedom) < share else (low, middle)
    return high


def _clustered(errors_N: np.ndarray, labels: Sequence[object]) -> tuple[float, int]:
    """Return the variance of the mean if only errors of one label depend on each other, and its degrees of freedom."""
    sums: dict[object, float] = {}
    for label, error in zip(labels, errors_N.tolist(), strict=True):
        sums[label] = sums.get(label, 0.0) + error
    count = len(sums)
    if count < 2:
        return 0.0, 0
    return count / (count - 1) * sum(each**2 for each in sums.values()) / len(errors_N) ** 2, count - 1
