"""The gated activation of the feed-forward block: silu(gate) * up, both halves of one product's columns.

Float32 inside, rounded once. Nothing is recorded for autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_T2i: Tensor) -> Tensor:
    return swiglu_triton(gate_up_T2i) if gate_up_T2i.is_cuda else swiglu_torch(gate_up_T2i)


def swiglu_backward(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    """The activation again, which the next product's weight gradient needs, and the gradient of gate and up."""
    function = swiglu_backward_triton if gate_up_T2i.is_cuda else swiglu_backward_torch
    return function(gate_up_T2i, grad_Ti)


def swiglu_torch(gate_up_T2i: Tensor) -> Tensor:
    gate, up = gate_up_T2i.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_T2i.dtype)


def swiglu_backward_torch(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up_T2i.float().chunk(2, dim=-1)
    grad = grad_Ti.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate_up_T2i = torch.cat([grad_gate, grad * silu], dim=-1)
    return (silu * up).to(gate_up_T2i.dtype), grad_gate_up_T2i.to(gate_up_T2i.dtype)


def swiglu_triton(gate_up_T2i: Tensor) -> Tensor:
    from dapo.kernels._swiglu_triton import forward

    return forward(gate_up_T2i)


def swiglu_backward_triton(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    from dapo.kernels._swiglu_triton import backward

    return backward(gate_up_T2i, grad_Ti)
