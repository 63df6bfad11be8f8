"""How likely a group was to reach the batch, and the weights that undo it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def mixed_probe_chance(counts: Sequence[int], n: int, probe: int) -> float:
    """Return the probability that `probe` of a group's n responses, drawn without order, are not all equal.

    `counts`: how many judged responses share each value of the metric. A probe with an unjudged response never settles
    a group. The responses of a group are exchangeable, so this is the chance that the group was sampled to the end,
    given its responses: 1 - sum over counts c of C(c, probe) / C(n, probe).
    """
    return 1 - sum(math.comb(count, probe) for count in counts) / math.comb(n, probe)


def inclusion_weights(chances: Sequence[float], sizes: Sequence[int]) -> np.ndarray:
    """Return 1 / chance for each group, scaled so that the batch keeps its size: sum w_g size_g = sum size_g.

    The weighted mean over the batch then estimates what the mean would be if every group had been let in.
    """
    weights = 1 / np.asarray(chances, np.float64)
    total = (weights * sizes).sum()
    return weights * (np.sum(sizes) / total) if total > 0 else np.ones_like(weights)
