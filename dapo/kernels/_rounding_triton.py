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
    wide_ptr, base_ptr, out_ptr, size,
    HAS_BASE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, QUIET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one block. `out_ptr` points to the bits of the bf16 numbers as int16."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.load(wide_ptr + index, mask=inside, other=0.0)
    if HAS_BASE:
        base = tl.load(base_ptr + index, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(total == 0, base, base + total)  # -0.0 + 0.0 would be 0.0
    x = index.to(tl.uint32)
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    threshold = (x ^ (x >> 16)) & 0xFFFF
    bits = total.to(tl.uint32, bitcast=True)
    kept = tl.where(total != total, bits | QUIET, bits + threshold)
    tl.store(out_ptr + index, (kept >> 16).to(tl.int16), mask=inside)


def round_dithered(wide_oi: Tensor, out_oi: Tensor, base_oi: Tensor | None = None) -> None:
    base = wide_oi if base_oi is None else base_oi
    assert wide_oi.is_contiguous() and out_oi.is_contiguous() and base.is_contiguous()
    assert wide_oi.dtype == torch.float32 and out_oi.dtype == torch.bfloat16
    size = wide_oi.numel()
    _kernel[(triton.cdiv(size, _BLOCK),)](
        wide_oi, base, out_oi.view(torch.int16), size,
        HAS_BASE=base_oi is not None, FIRST=HASH_1, SECOND=HASH_2, QUIET=QUIET_NAN, BLOCK=_BLOCK,
    )  # fmt: skip
