"""Group-relative advantages."""

import numpy as np


def group_advantages(rewards_G: np.ndarray, *, divide_by_std: bool = True) -> np.ndarray:
    """Return A_i = (R_i - mean R) / (std R + 1e-6), computed over the judged rollouts of one group.

    A NaN reward marks an unjudged rollout, which gets advantage 0. `std` is the sample standard deviation (n - 1).
    `divide_by_std=False` only centers the rewards.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    judged = ~np.isnan(rewards_G)
    values = rewards_G[judged]
    advantages_G = np.zeros_like(rewards_G)
    # Compare exactly: the mean of equal rewards can round, and then their floating-point std is not 0.
    if len(values) < 2 or values.max() == values.min():
        return advantages_G
    centered = values - values.mean()
    advantages_G[judged] = centered / (values.std(ddof=1) + 1e-6) if divide_by_std else centered
    return advantages_G
