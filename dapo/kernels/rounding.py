"""Stochastic rounding to bf16, which keeps small changes of weights on average.

Rounding to the nearest number would discard every change of less than half the distance between two bf16 numbers, and
most changes by one update or by LoRA adapters are smaller. Here a number between two neighbors is rounded up or down at
random, such that its mean is exact. The random bits are a hash of the element's index, so the result is repeatable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel_where, on_cuda
from dapo.kernels.native import is_native

# A 32-bit integer hash: two multiplications between three shifts.
HASH_1, HASH_2 = 0x7FEB352D, 0x846CA68B
QUIET_NAN = 0x400000


def _is_native(wide_oi: Tensor, out_oi: Tensor, base_oi: Tensor | None = None) -> bool:
    tensors = (wide_oi, out_oi, base_oi)
    is_narrow = out_oi.dtype == torch.bfloat16
    return is_narrow and all(each is None or each.is_contiguous() for each in tensors) and is_native(out_oi, base_oi)


@kernel_where(on_cuda, native=_is_native)
def round_dithered(wide_oi: Tensor, out_oi: Tensor, base_oi: Tensor | None = None) -> None:
    """Round float32 numbers, plus a bf16 base if given, into `out`. Where a number is 0, `out` is exactly the base."""
    total = wide_oi
    if base_oi is not None:
        base = base_oi.float()
        total = torch.where(wide_oi == 0, base, base + wide_oi)  # -0.0 + 0.0 would be 0.0
    bits = total.view(torch.int32)
    # Adding 16 random bits to the 16 that are dropped carries into the kept ones with the right probability.
    kept = torch.where(total.isnan(), bits | QUIET_NAN, bits + _thresholds(total))
    out_oi.copy_((kept >> 16).to(torch.int16).view(torch.bfloat16))


def _thresholds(like: Tensor) -> Tensor:
    """Return 16 random bits for each element, hashed from its index in wrapping int32."""
    x = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view_as(like)
    x = (x ^ _shift(x, 16)) * HASH_1
    x = (x ^ _shift(x, 15)) * (HASH_2 - (1 << 32))
    return (x ^ _shift(x, 16)) & 0xFFFF


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, as for unsigned integers."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
