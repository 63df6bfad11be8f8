"""RMS norm of the float32 residual stream, with the addition of a block's output to that stream fused in.

The stream stays in float32; what enters a matrix product is rounded once to the narrow type. These are plain forward
and backward functions on tensors: they record nothing for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed sum of both, the sum (without a delta the residual itself), and 1 / rms of each row.

    The normed rows have the given type; left open, the delta's, or without a delta the weight's.
    """
    function = add_rms_norm_triton if residual_Td.is_cuda else add_rms_norm_torch
    return function(residual_Td, delta_Td, weight_d, eps, dtype)


def add_rms_norm_backward(
    grad_normed_Td: Tensor,
    grad_residual_Td: Tensor | None,
    residual_out_Td: Tensor,
    rstd_T: Tensor,
    weight_d: Tensor,
    weight_grad_d: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum in float32 and in the narrow type; the weight's is added to `weight_grad_d`."""
    function = add_rms_norm_backward_triton if residual_out_Td.is_cuda else add_rms_norm_backward_torch
    return function(grad_normed_Td, grad_residual_Td, residual_out_Td, rstd_T, weight_d, weight_grad_d)


def add_rms_norm_torch(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    residual_out_Td = residual_Td if delta_Td is None else residual_Td + delta_Td.float()
    rstd_T = torch.rsqrt(residual_out_Td.square().mean(-1) + eps)
    normed_Td = residual_out_Td * rstd_T[:, None] * weight_d.float()
    return normed_Td.to(_narrow(delta_Td, weight_d, dtype)), residual_out_Td, rstd_T


def add_rms_norm_backward_torch(
    grad_normed_Td: Tensor,
    grad_residual_Td: Tensor | None,
    residual_out_Td: Tensor,
    rstd_T: Tensor,
    weight_d: Tensor,
    weight_grad_d: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad_wide = grad_normed_Td.float()
    unit = residual_out_Td * rstd_T[:, None]
    pulled = grad_wide * weight_d.float()
    grad_Td = rstd_T[:, None] * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))
    if grad_residual_Td is not None:
        grad_Td = grad_Td + grad_residual_Td
    if weight_grad_d is not None:
        weight_grad_d.add_((grad_wide * unit).sum(0))
    return grad_Td, grad_Td.to(grad_normed_Td.dtype, copy=True)


def add_rms_norm_triton(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from dapo.kernels._norm_triton import forward

    return forward(residual_Td, delta_Td, weight_d, eps, _narrow(delta_Td, weight_d, dtype))


def add_rms_norm_backward_triton(
    grad_normed_Td: Tensor,
    grad_residual_Td: Tensor | None,
    residual_out_Td: Tensor,
    rstd_T: Tensor,
    weight_d: Tensor,
    weight_grad_d: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from dapo.kernels._norm_triton import backward

    return backward(grad_normed_Td, grad_residual_Td, residual_out_Td, rstd_T, weight_d, weight_grad_d)


def _narrow(delta_Td: Tensor | None, weight_d: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (weight_d if delta_Td is None else delta_Td).dtype
