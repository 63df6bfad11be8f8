"""Sizes of launches that several kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

# Programs that walk over many tiles, so that each leaves one partial sum: enough warps per multiprocessor to hide the
# memory's latency, few enough that the partial sums cost nothing.
_WALKERS_PER_PROCESSOR = 4
_WALKERS_INTERPRETED = 2


def walkers(like: Tensor, tiles: int) -> int:
    """How many programs share `tiles`. It depends on sizes and device alone, so sums come out the same every time."""
    if not like.is_cuda:
        return min(tiles, _WALKERS_INTERPRETED)
    processors = torch.cuda.get_device_properties(like.device).multi_processor_count
    return min(tiles, processors * _WALKERS_PER_PROCESSOR)


def warps_for(elements: int) -> int:
    """16 values for each thread of a tile: two to four accesses of 16 bytes in flight for every tensor."""
    return max(4, min(16, elements // 512))
