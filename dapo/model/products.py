"""Products of matrices: with the same bits for any number of rows, or with a float32 result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.kernels import native

# Without split sums, a product of few rows with many terms leaves most of a GPU idle. Padded to _ENOUGH_ROWS rows it is
# faster (docs/explanation/performance.md).
_MANY_TERMS = 4096
_ENOUGH_ROWS = 128
# A sum over many tokens with a small result would leave most of a GPU idle too: it is split into this many parts.
_SUM_PARTS = 16
_LEAST_SUMMED = 64  # tokens of a part


def same_bits_for_any_rows() -> None:
    """Stop all products on GPUs from splitting their sums (split-K), for the whole process.

    The library would decide to split by the number of rows. The sampler computes a few rows at a time and the trainer
    thousands; if their bits differ, rounding makes a gap of hundredths between their log-probabilities.
    """
    if "Cublaslt" not in str(torch.backends.cuda.preferred_blas_library()):  # torch was imported before dapo
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def linear(input_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias, with contiguous rows."""
    rows, terms = input_Ti.shape
    if input_Ti.is_cuda and terms >= _MANY_TERMS and rows < _ENOUGH_ROWS:
        return F.linear(F.pad(input_Ti, (0, 0, 0, _ENOUGH_ROWS - rows)), weight_oi, bias_o)[:rows]
    if native.can_multiply(input_Ti, weight_oi):
        return native.product(input_Ti, weight_oi, bias_o)
    return F.linear(input_Ti, weight_oi, bias_o)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. Logits rounded to bf16 would be off by up to a tenth."""
    if native.can_multiply(a, b.t()):
        return native.product(a, b.t(), is_wide=True)
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def input_grad(grad_out_To: Tensor, weight_oi: Tensor) -> Tensor:
    """Return the gradient of the input in `input @ weight.T`."""
    if grad_out_To.dtype == torch.float32 and native.is_native(grad_out_To, weight_oi):
        return native.plain_product(grad_out_To, weight_oi)
    return grad_out_To @ weight_oi


def add_weight_grad(total_oi: Tensor, grad_out_To: Tensor, input_Ti: Tensor) -> None:
    """Add the gradient of `weight` in `input @ weight.T` to the total, in the total's precision.

    A bf16 sum over micro-batches would lose small terms.
    """
    if total_oi.is_contiguous() and native.is_native(grad_out_To, input_Ti):
        native.add_product(total_oi, grad_out_To, input_Ti)
    elif total_oi.dtype == input_Ti.dtype:
        total_oi.addmm_(grad_out_To.t(), input_Ti)
    elif input_Ti.is_cuda:
        torch.addmm(total_oi, grad_out_To.t(), input_Ti, out_dtype=total_oi.dtype, out=total_oi)  # pyright: ignore[reportCallIssue]
    else:
        total_oi.addmm_(grad_out_To.t().to(total_oi.dtype), input_Ti.to(total_oi.dtype))


def add_small_grad(total_oi: Tensor, grad_out_To: Tensor, input_Ti: Tensor) -> None:
    """Add as `add_weight_grad` does, faster if the result is small, as the gradient of a LoRA adapter is."""
    tokens = len(input_Ti)
    if not input_Ti.is_cuda or tokens < _SUM_PARTS * _LEAST_SUMMED or input_Ti.dtype != torch.bfloat16:
        add_weight_grad(total_oi, grad_out_To, input_Ti)
        return
    total_oi += sum_in_parts(grad_out_To, input_Ti, _SUM_PARTS)


def sum_in_parts(a_To: Tensor, b_Ti: Tensor, parts: int) -> Tensor:
    """Return a.T @ b in float32, as the sum of `parts` products over equal numbers of tokens and one over the rest."""
    even = len(a_To) - len(a_To) % parts
    a, b = (tensor[:even].unflatten(0, (parts, -1)) for tensor in (a_To, b_Ti))
    total = _wide_batch_product(a.transpose(1, 2), b).sum(0)
    if even < len(a_To):
        total += wide_product(a_To[even:].t(), b_Ti[even:])
    return total


def _wide_batch_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
