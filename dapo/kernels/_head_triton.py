"""Triton kernels of the loss head: one pass over the logits for the statistics, one for the gradient."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST_BLOCK = 4096  # logits


@triton.jit
def _statistics_kernel(
    logits_ptr, targets_ptr, logprobs_ptr, entropy_ptr, normalizer_ptr, row_stride, width, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one row per program: an online softmax over blocks of BLOCK logits, each read once.

    With d = x - peak, mass = sum of exp(d) and moment = sum of exp(d) * d, the entropy is
    log(mass) - moment / mass.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    # Finite, because with -inf the first rescaling below would multiply the empty sums by infinity: 0 * inf = NaN.
    peak = -1e30
    # Each of the BLOCK lanes keeps its own sums until the end. Only the peak, common to all, is reduced per block.
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < width, other=float("-inf")) * scale
        new_peak = tl.maximum(peak, tl.max(x, axis=0))
        shrink = tl.exp(peak - new_peak)
        distance = x - new_peak
        exponential = tl.exp(distance)
        # Move the old sums to the new peak: d grows by (peak - new_peak), exp(d) shrinks by its exponential.
        moment = shrink * (moment + mass * (peak - new_peak))
        # A logit of -inf has no mass; exp(d) * d would be 0 * -inf = NaN.
        moment += tl.where(exponential > 0, exponential * distance, 0.0)
        mass = shrink * mass + exponential
        peak = new_peak
    total = tl.sum(mass, axis=0)
    log_total = tl.log(total)
    target = tl.load(row_ptr + tl.load(targets_ptr + row)) * scale
    tl.store(logprobs_ptr + row, target - peak - log_total)
    tl.store(entropy_ptr + row, log_total - tl.sum(moment, axis=0) / total)
    tl.store(normalizer_ptr + row, peak + log_total)


@triton.jit
def _gradient_kernel(
    logits_ptr, normalizer_ptr, targets_ptr, grad_logprobs_ptr, out_ptr, row_stride, out_stride, width, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of one row per program.

    Each program reads a logit before it overwrites it, and no other program needs it: the output may be the logits.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf")) * scale
    softmax = tl.exp(x - tl.load(normalizer_ptr + row))
    one_hot = tl.where(column == tl.load(targets_ptr + row), 1.0, 0.0)
    grad = tl.load(grad_logprobs_ptr + row) * scale * (one_hot - softmax)
    tl.store(out_ptr + row * out_stride + column, grad.to(out_ptr.dtype.element_ty), mask=inside)


def logprobs_and_entropy(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    assert logits_CV.stride(1) == 1
    rows, width = logits_CV.shape
    logprobs_C, entropy_C, normalizer_C = (logits_CV.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _statistics_kernel[(rows,)](
        logits_CV, targets_C, logprobs_C, entropy_C, normalizer_C, logits_CV.stride(0), width, 1 / temperature,
        BLOCK=_block(width), num_warps=8,
    )  # fmt: skip
    return logprobs_C, entropy_C, normalizer_C


def logits_gradient(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    temperature: float,
    out_CV: Tensor,
) -> None:
    assert logits_CV.stride(1) == out_CV.stride(1) == 1
    assert logits_CV.shape == out_CV.shape
    rows, width = logits_CV.shape
    block = _block(width)
    _gradient_kernel[(rows * triton.cdiv(width, block),)](
        # The gradient of a sum comes from autograd as one value with stride 0.
        logits_CV, normalizer_C, targets_C, grad_logprobs_C.contiguous(), out_CV,
        logits_CV.stride(0), out_CV.stride(0), width, 1 / temperature,
        BLOCK=block, num_warps=8,
    )  # fmt: skip


def _block(width: int) -> int:
    return min(_WIDEST_BLOCK, triton.next_power_of_2(width))
