"""The gated activation of the feed-forward block: silu(gate) * up.

Gate and up are the left and the right half of the columns of one matrix product. The computation is in float32 and
rounded once. Nothing is recorded for autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.kernels.dispatch import kernel_where, on_cuda
from dapo.kernels.native import is_native


@kernel_where(on_cuda, native=is_native)
def swiglu(gate_up_T2i: Tensor) -> Tensor:
    """Return the activation [T, i]."""
    gate, up = gate_up_T2i.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_T2i.dtype)


@kernel_where(on_cuda, native=is_native)
def swiglu_backward(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation, recomputed for the next product's weight gradient, and the gradient of gate and up."""
    gate, up = gate_up_T2i.float().chunk(2, dim=-1)
    grad = grad_Ti.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate_up_T2i = torch.cat([grad_gate, grad * silu], dim=-1)
    return (silu * up).to(gate_up_T2i.dtype), grad_gate_up_T2i.to(gate_up_T2i.dtype)
