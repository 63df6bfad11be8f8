"""The size of a round: how many groups to sample so that enough of them are kept."""

from __future__ import annotations

from math import exp, lgamma


def groups_needed(missing: int, kept: int, decided: int, most: int, confidence: float = 0.9) -> int:
    """Return how many groups, at most `most`, to sample so that at least `missing` are kept with this probability.

    `kept` of the latest `decided` groups were kept, and one more is assumed, so that the keep rate is never 0.
    The rate then has a beta distribution, and the number of new groups that are kept a beta-binomial one, which
    includes the uncertainty about the rate. If all groups were kept, as without a filter, all new ones will be, too.
    """
    if kept == decided:
        return min(missing, most)
    low, high = missing, max(missing, most)  # invariant: the answer lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        if _chance_of_enough(missing, middle, kept + 1, decided - kept) < confidence:
            low = middle + 1
        else:
            high = middle
    return min(low, most)


def _chance_of_enough(missing: int, groups: int, a: int, b: int) -> float:
    """Return P(X >= missing) for X ~ beta-binomial(groups, a, b)."""
    constant = lgamma(groups + 1) + lgamma(a + b) - lgamma(a) - lgamma(b) - lgamma(groups + a + b)
    return 1 - sum(
        exp(constant + lgamma(k + a) + lgamma(groups - k + b) - lgamma(k + 1) - lgamma(groups - k + 1))
        for k in range(missing)
    )
