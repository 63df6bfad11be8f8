"""Copy rows to several readers, and sum the gradients of the copies on the way back.

The keys and values of a shared prompt are copied this way in front of each of its responses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel


@kernel
def spread(values_TW: Tensor, sources_K: Tensor) -> Tensor:
    """Return values_TW[sources_K]. The rows may be strided."""
    return values_TW.index_select(0, sources_K)


@kernel
def gather_sum(grads_KW: Tensor, starts: Tensor, places_K: Tensor) -> Tensor:
    """Sum grads_KW over places_K[starts[t] : starts[t + 1]] for each row t, in that order, in float32, rounded once.

    This is the backward of `spread` when those places are the copies of row t. The rows may be strided.
    """
    counts = starts.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), counts)
    sums = grads_KW.new_zeros(len(counts), grads_KW.shape[1], dtype=torch.float32)
    sums.index_add_(0, rows, grads_KW.index_select(0, places_K[: len(rows)]).float())
    return sums.to(grads_KW.dtype)
