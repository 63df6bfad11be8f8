"""Triton kernel of the dithered rounding, elementwise over contiguous tensors."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.kernels.rounding import HASH_1, HASH_2, QUIET_NAN

_BLOCK = 2048


@triton.jit
def _kernel(
    base_ptr, delta_ptr, out_ptr, size,
    FIRST: tl.constexpr, SECOND: tl.constexpr, QUIET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one block. `out_ptr` points to the bits of the bf16 numbers as int16."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    base = tl.load(base_ptr + index, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + index, mask=inside, other=0.0)
    total = tl.where(delta == 0, base, base + delta)  # -0.0 + 0.0 would be 0.0
    x = index.to(tl.uint32)
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    threshold = (x ^ (x >> 16)) & 0xFFFF
    bits = total.to(tl.uint32, bitcast=True)
    kept = tl.where(total != total, bits | QUIET, bits + threshold)
    tl.store(out_ptr + index, (kept >> 16).to(tl.int16), mask=inside)


def add_dithered(base_oi: Tensor, delta_oi: Tensor, out_oi: Tensor) -> None:
    assert base_oi.is_contiguous() and delta_oi.is_contiguous() and out_oi.is_contiguous()
    assert base_oi.dtype == out_oi.dtype == torch.bfloat16 and delta_oi.dtype == torch.float32
    size = base_oi.numel()
    _kernel[(triton.cdiv(size, _BLOCK),)](
        base_oi, delta_oi, out_oi.view(torch.int16), size,
        FIRST=HASH_1, SECOND=HASH_2, QUIET=QUIET_NAN, BLOCK=_BLOCK,
    )  # fmt: skip
