"""Launch sizes that several kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

# A persistent program walks over many tiles and leaves one partial sum. There are enough of them to hide the latency of
# the memory, and few enough that adding up the partial sums costs next to nothing.
_PROGRAMS_PER_MULTIPROCESSOR = 4
_PROGRAMS_INTERPRETED = 2


def persistent_programs(like: Tensor, tiles: int) -> int:
    """Return how many programs share `tiles`.

    The count depends only on the sizes and the device, so a sum over tiles has the same order every time.
    """
    if not like.is_cuda:
        return min(tiles, _PROGRAMS_INTERPRETED)
    multiprocessors = torch.cuda.get_device_properties(like.device).multi_processor_count
    return min(tiles, multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR)


def warps_for(elements: int) -> int:
    """Return the warps that give each thread 16 elements of a tile, within 4 to 16 warps.

    16 elements are two to four accesses of 16 bytes in flight per tensor.
    """
    return max(4, min(16, elements // 512))
