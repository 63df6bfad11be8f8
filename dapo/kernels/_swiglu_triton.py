"""Triton kernels of the gated activation, elementwise over tiles of _ROWS rows by _BLOCK columns."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _BLOCK = 4, 512


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(gate_up_ptr, act_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one tile per program. WIDTH is the width of gate, half that of `gate_up`."""
    # Neighboring programs take neighboring columns of the same rows.
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    gate_offset = row[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(gate_up_ptr + gate_offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_offset + WIDTH, mask=inside, other=0.0).to(tl.float32)
    act = gate * tl.sigmoid(gate) * up
    tl.store(act_ptr + row[:, None] * WIDTH + column[None, :], act.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    gate_up_ptr, grad_ptr, act_ptr, grad_gate_up_ptr, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute one tile of the activation per program, and write it with the gradients of gate and up."""
    narrow = act_ptr.dtype.element_ty
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    gate_offset = row[:, None] * (2 * WIDTH) + column[None, :]
    act_offset = row[:, None] * WIDTH + column[None, :]
    gate = tl.load(gate_up_ptr + gate_offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_offset + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + act_offset, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(act_ptr + act_offset, (silu * up).to(narrow), mask=inside)
    tl.store(grad_gate_up_ptr + gate_offset, grad_gate.to(narrow), mask=inside)
    tl.store(grad_gate_up_ptr + gate_offset + WIDTH, (grad * silu).to(narrow), mask=inside)


def swiglu(gate_up_T2i: Tensor) -> Tensor:
    assert gate_up_T2i.is_contiguous()
    rows, width = gate_up_T2i.shape[0], gate_up_T2i.shape[1] // 2
    act_Ti = gate_up_T2i.new_empty(rows, width)
    _forward_kernel[_grid(rows, width)](gate_up_T2i, act_Ti, rows, WIDTH=width, ROWS=_ROWS, BLOCK=_BLOCK)
    return act_Ti


def swiglu_backward(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    assert gate_up_T2i.is_contiguous()
    assert grad_Ti.is_contiguous()
    rows, width = grad_Ti.shape
    act_Ti, grad_gate_up_T2i = torch.empty_like(grad_Ti, dtype=gate_up_T2i.dtype), torch.empty_like(gate_up_T2i)
    _backward_kernel[_grid(rows, width)](
        gate_up_T2i, grad_Ti, act_Ti, grad_gate_up_T2i, rows, WIDTH=width, ROWS=_ROWS, BLOCK=_BLOCK
    )
    return act_Ti, grad_gate_up_T2i


def _grid(rows: int, width: int) -> tuple[int]:
    return (triton.cdiv(rows, _ROWS) * triton.cdiv(width, _BLOCK),)
