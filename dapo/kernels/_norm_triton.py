"""Triton kernels of the RMS norm: whole rows in registers, so that each tensor is read or written exactly once."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.kernels._launch_triton import persistent_programs, warps_for
from dapo.kernels.norm import narrow_dtype

_TILE = 2048  # elements of a tile: several narrow rows, or one wide row


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    residual_ptr, delta_ptr, weight_ptr, normed_ptr, sum_ptr, rstd_ptr, rows, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS whole rows per program.

    The sum along a row stays inside one program, and its order depends only on the constants of the launch. A row
    therefore gets the same bits in the sampler's small batches and in the trainer's packs.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)  # BLOCK is WIDTH rounded up to a power of two
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offset = row[:, None] * WIDTH + column[None, :]
    x = tl.load(residual_ptr + offset, mask=inside, other=0.0)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + offset, x, mask=inside)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)  # masked columns are 0 and add nothing
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    normed = x * rstd[:, None] * weight[None, :]
    tl.store(normed_ptr + offset, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_normed_ptr, grad_residual_ptr, sum_ptr, rstd_ptr, weight_ptr, grad_ptr, grad_narrow_ptr, partials_ptr, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk over the tiles p, p + programs, p + 2 * programs, ... of ROWS rows each, where p is the program.

    Each program writes one row of `partials`: its share of the weight's gradient. No atomics, so the order of the
    additions is fixed.
    """
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        offset = row[:, None] * WIDTH + column[None, :]
        grad_normed = tl.load(grad_normed_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(sum_ptr + offset, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        grad = tl.zeros([ROWS, BLOCK], tl.float32)
        # Loaded before the reduction below, so that the load overlaps with it.
        if grad_residual_ptr is not None:
            grad = tl.load(grad_residual_ptr + offset, mask=inside, other=0.0)
        unit = x * rstd[:, None]
        grad_unit = grad_normed * weight[None, :]
        mean_product = tl.sum(grad_unit * unit, axis=1) / WIDTH
        grad += rstd[:, None] * (grad_unit - unit * mean_product[:, None])
        tl.store(grad_ptr + offset, grad, mask=inside)
        tl.store(grad_narrow_ptr + offset, grad.to(grad_narrow_ptr.dtype.element_ty), mask=inside)
        if partials_ptr is not None:
            weight_grad += tl.sum(grad_normed * unit, axis=0)
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0) * WIDTH + column, weight_grad, mask=column < WIDTH)


def add_rms_norm(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(residual_Td, delta_Td)
    rows, width = residual_Td.shape
    normed_Td = torch.empty_like(residual_Td, dtype=narrow_dtype(delta_Td, weight_d))
    residual_out_Td = residual_Td if delta_Td is None else torch.empty_like(residual_Td)
    rstd_T = residual_Td.new_empty(rows)
    tile_rows, block = _tile(width)
    _forward_kernel[(triton.cdiv(rows, tile_rows),)](
        residual_Td, delta_Td, weight_d, normed_Td, residual_out_Td, rstd_T, rows, eps,
        WIDTH=width, ROWS=tile_rows, BLOCK=block, num_warps=warps_for(tile_rows * block),
    )  # fmt: skip
    return normed_Td, residual_out_Td, rstd_T


def add_rms_norm_backward(
    grad_normed_Td: Tensor,
    grad_residual_Td: Tensor | None,
    residual_out_Td: Tensor,
    rstd_T: Tensor,
    weight_d: Tensor,
    weight_grad_d: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check(residual_out_Td, grad_normed_Td, grad_residual_Td)
    rows, width = residual_out_Td.shape
    grad_Td, grad_narrow_Td = torch.empty_like(residual_out_Td), torch.empty_like(grad_normed_Td)
    tile_rows, block = _tile(width)
    tiles = triton.cdiv(rows, tile_rows)
    programs = tiles if weight_grad_d is None else persistent_programs(residual_out_Td, tiles)
    partials = None if weight_grad_d is None else residual_out_Td.new_empty(programs, width)
    _backward_kernel[(programs,)](
        grad_normed_Td, grad_residual_Td, residual_out_Td, rstd_T, weight_d, grad_Td, grad_narrow_Td, partials, rows,
        WIDTH=width, ROWS=tile_rows, BLOCK=block, num_warps=warps_for(tile_rows * block),
    )  # fmt: skip
    if weight_grad_d is not None and partials is not None:
        weight_grad_d.add_(partials.sum(0))
    return grad_Td, grad_narrow_Td


def _tile(width: int) -> tuple[int, int]:
    """Return the rows and the padded width of a tile."""
    block = triton.next_power_of_2(width)
    return max(1, _TILE // block), block


def _check(wide_Td: Tensor, *others: Tensor | None) -> None:
    assert wide_Td.dtype == torch.float32, wide_Td.dtype
    for tensor in (wide_Td, *others):
        assert tensor is None or (tensor.shape == wide_Td.shape and tensor.is_contiguous()), tensor.shape
