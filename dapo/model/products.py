"""Products of bf16 matrices: those whose rows must not depend on how many there are, and those that stay in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Without a sum that is split up, few rows with many terms leave most of a GPU idle: there it pays to compute more rows.
_MANY_TERMS = 4096
_ENOUGH_ROWS = 128


def same_bits_for_any_rows() -> None:
    """From now on no product on a GPU splits its sums, which it would do or not by the number of rows.

    A sampler computes a few rows at a time and a trainer thousands. Where their bits differ, rounding makes a gap of
    hundredths between their log-probabilities.
    """
    if "Cublaslt" not in str(torch.backends.cuda.preferred_blas_library()):  # torch was imported before dapo
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def linear(input_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    rows, terms = input_Ti.shape
    if input_Ti.is_cuda and terms >= _MANY_TERMS and rows < _ENOUGH_ROWS:
        return F.linear(F.pad(input_Ti, (0, 0, 0, _ENOUGH_ROWS - rows)), weight_oi, bias_o)[:rows]
    return F.linear(input_Ti, weight_oi, bias_o)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices in float32: logits rounded to bf16 are off by a tenth, far more than the weights are."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def add_weight_grad(total_oi: Tensor, grad_out_To: Tensor, input_Ti: Tensor) -> None:
    """Adds the gradient of `weight` in `input @ weight.T`, in the precision of the total: bf16 sums would lose the
    small terms."""
    if total_oi.dtype == input_Ti.dtype:
        total_oi.addmm_(grad_out_To.t(), input_Ti)
    elif input_Ti.is_cuda:
        torch.addmm(total_oi, grad_out_To.t(), input_Ti, out_dtype=total_oi.dtype, out=total_oi)  # pyright: ignore[reportCallIssue]
    else:
        total_oi.addmm_(grad_out_To.t().to(total_oi.dtype), input_Ti.to(total_oi.dtype))
