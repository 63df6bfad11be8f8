"""Group-relative advantages. Each function takes the rewards of a group's judged rollouts."""

from collections.abc import Callable

import numpy as np

Advantage = Callable[[np.ndarray], np.ndarray]


def normalized(rewards_G: np.ndarray) -> np.ndarray:
    """Return A_i = (R_i - mean R) / (std R + 1e-6), with the sample standard deviation (n - 1)."""
    return centered(rewards_G) / (rewards_G.std(ddof=1) + 1e-6)


def centered(rewards_G: np.ndarray) -> np.ndarray:
    """Return A_i = R_i - mean R."""
    # Compare exactly: the mean of equal rewards can round, and then they differ from it.
    if rewards_G.max() == rewards_G.min():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def group_advantages(rewards_G: np.ndarray, advantage: Advantage = normalized) -> np.ndarray:
    """Return the advantages of a group. A NaN reward marks an unjudged rollout, which gets advantage 0."""
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    judged = ~np.isnan(rewards_G)
    advantages_G = np.zeros_like(rewards_G)
    if judged.sum() >= 2:
        advantages_G[judged] = advantage(rewards_G[judged])
    return advantages_G
