"""Products of bf16 matrices whose results stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor


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
