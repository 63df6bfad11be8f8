"""Triton kernels that copy rows by index, and sum them back without atomics."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDEST_BLOCK = 512  # columns
_COPY_TILE, _SUM_TILE = 4096, 2048  # elements


@triton.jit(do_not_specialize=["rows"])
def _copy_kernel(
    values_ptr, sources_ptr, out_ptr, rows, values_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy ROWS output rows by BLOCK columns per program: one index and one part of a row are read per output row."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    source = tl.load(sources_ptr + row, mask=row < rows, other=0).to(tl.int64)
    values = tl.load(values_ptr + source[:, None] * values_stride + column[None, :], mask=inside)
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    grads_ptr, starts_ptr, places_ptr, out_ptr, rows, grads_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the copies of ROWS rows by BLOCK columns per program.

    One program adds all copies of its rows, in the order of `places`. Atomics would add them in the order in which
    programs happen to run, and so give other bits each time.
    """
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + row, mask=row < rows, other=0)
    count = tl.load(starts_ptr + row + 1, mask=row < rows, other=0) - start
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    # The tile loops as often as its row with the most copies; rows with fewer copies load nothing in the extra turns.
    for i in range(tl.max(count, axis=0)):
        place = tl.load(places_ptr + start + i, mask=i < count, other=0).to(tl.int64)
        present = (i < count)[:, None] & (column < WIDTH)[None, :]
        grads = tl.load(grads_ptr + place[:, None] * grads_stride + column[None, :], mask=present, other=0.0)
        total += grads.to(tl.float32)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def spread(values_TW: Tensor, sources_K: Tensor) -> Tensor:
    assert values_TW.stride(1) == 1
    rows, width = len(sources_K), values_TW.shape[1]
    out_KW = values_TW.new_empty(rows, width)
    tile_rows, block, grid = _tile(rows, width, _COPY_TILE)
    _copy_kernel[grid](
        values_TW, sources_K, out_KW, rows, values_TW.stride(0), WIDTH=width, ROWS=tile_rows, BLOCK=block
    )
    return out_KW


def gather_sum(grads_KW: Tensor, starts: Tensor, places_K: Tensor) -> Tensor:
    assert grads_KW.stride(1) == 1
    rows, width = len(starts) - 1, grads_KW.shape[1]
    out_TW = grads_KW.new_empty(rows, width)
    tile_rows, block, grid = _tile(rows, width, _SUM_TILE)
    _sum_kernel[grid](
        grads_KW, starts, places_K, out_TW, rows, grads_KW.stride(0), WIDTH=width, ROWS=tile_rows, BLOCK=block
    )
    return out_TW


def _tile(rows: int, width: int, elements: int) -> tuple[int, int, tuple[int]]:
    """Return the rows and columns of a tile, and the grid that covers the output with such tiles."""
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
    tile_rows = min(32, elements // block)
    return tile_rows, block, (triton.cdiv(rows, tile_rows) * triton.cdiv(width, block),)
