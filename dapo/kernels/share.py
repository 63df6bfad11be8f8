"""Rows that several readers use: a copy for each reader, and for the backward pass the sum of the copies' gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(values_TW: Tensor, sources_K: Tensor) -> Tensor:
    """values_TW[sources_K]; the rows may be strided."""
    return spread_triton(values_TW, sources_K) if values_TW.is_cuda else spread_torch(values_TW, sources_K)


def gather_sum(grads_KW: Tensor, starts: Tensor, places_K: Tensor) -> Tensor:
    """Row t is the sum of grads_KW over places_K[starts[t] : starts[t + 1]], in that order, in float32, rounded once.

    It undoes `spread` when those places are the copies of row t. The rows may be strided.
    """
    function = gather_sum_triton if grads_KW.is_cuda else gather_sum_torch
    return function(grads_KW, starts, places_K)


def spread_torch(values_TW: Tensor, sources_K: Tensor) -> Tensor:
    return values_TW.index_select(0, sources_K)


def gather_sum_torch(grads_KW: Tensor, starts: Tensor, places_K: Tensor) -> Tensor:
    counts = starts.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), counts)
    sums = grads_KW.new_zeros(len(counts), grads_KW.shape[1], dtype=torch.float32)
    sums.index_add_(0, rows, grads_KW.index_select(0, places_K[: len(rows)]).float())
    return sums.to(grads_KW.dtype)


def spread_triton(values_TW: Tensor, sources_K: Tensor) -> Tensor:
    from dapo.kernels._share_triton import copy_rows

    return copy_rows(values_TW, sources_K)


def gather_sum_triton(grads_KW: Tensor, starts: Tensor, places_K: Tensor) -> Tensor:
    from dapo.kernels._share_triton import sum_rows

    return sum_rows(grads_KW, starts, places_K)
