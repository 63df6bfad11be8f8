"""RMS norm of the float32 residual stream, fused with adding a block's output to that stream.

The stream stays in float32. Only the input of a matrix product is rounded, once, to the model's dtype ("narrow" below).
These are plain forward and backward functions on tensors: they record nothing for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel, kernel_where, on_cuda
from dapo.kernels.native import is_native


def _is_native(residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float) -> bool:
    return residual_Td.dtype == torch.float32 and is_native(delta_Td, weight_d)


@kernel_where(on_cuda, native=_is_native)
def add_rms_norm(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed sum of residual and delta, the sum itself, and 1 / rms of each row.

    Without a delta, the sum is the residual tensor itself, not a copy. The normed rows have the dtype of the delta, or
    that of the weight where there is no delta.
    """
    residual_out_Td = residual_Td if delta_Td is None else residual_Td + delta_Td.float()
    rstd_T = torch.rsqrt(residual_out_Td.square().mean(-1) + eps)
    normed_Td = residual_out_Td * rstd_T[:, None] * weight_d.float()
    return normed_Td.to(narrow_dtype(delta_Td, weight_d)), residual_out_Td, rstd_T


@kernel
def add_rms_norm_backward(
    grad_normed_Td: Tensor,
    grad_residual_Td: Tensor | None,
    residual_out_Td: Tensor,
    rstd_T: Tensor,
    weight_d: Tensor,
    weight_grad_d: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum, in float32 and in the dtype of `grad_normed_Td`.

    `grad_residual_Td` is the gradient that reaches the sum along the residual stream. The gradient of the norm's weight
    is added to `weight_grad_d`, unless that is None.
    """
    grad_wide = grad_normed_Td.float()
    # With u = x * rstd, the normed row is u * weight, and d(u)/d(x) = rstd * (I - u u^T / d).
    unit = residual_out_Td * rstd_T[:, None]
    grad_unit = grad_wide * weight_d.float()
    grad_Td = rstd_T[:, None] * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
    if grad_residual_Td is not None:
        grad_Td = grad_Td + grad_residual_Td
    if weight_grad_d is not None:
        weight_grad_d.add_((grad_wide * unit).sum(0))
    return grad_Td, grad_Td.to(grad_normed_Td.dtype, copy=True)


def narrow_dtype(delta_Td: Tensor | None, weight_d: Tensor) -> torch.dtype:
    return (weight_d if delta_Td is None else delta_Td).dtype
