"""Group-relative advantages."""

import numpy as np


def group_advantages(rewards_G: np.ndarray, *, divide_by_std: bool = True) -> np.ndarray:
    """A_i = (R_i - mean R) / (std R + 1e-6) over the judged rollouts; NaN rewards are unjudged and get 0.

    The standard deviation is the sample one (n - 1). Equal rewards give exactly 0, however their mean rounds.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    judged = ~np.isnan(rewards_G)
    values = rewards_G[judged]
    advantages_G = np.zeros_like(rewards_G)
    if len(values) < 2 or values.max() == values.min():
        return advantages_G
    centerd = values - values.mean()
    advantages_G[judged] = centerd / (values.std(ddof=1) + 1e-6) if divide_by_std else centerd
    return advantages_G
