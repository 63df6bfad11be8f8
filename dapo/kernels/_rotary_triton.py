"""Triton kernels of the rotary position embedding and the head norms.

A tile is a run of consecutive (token, head) pairs. The heads of one token are neighbors, so their common row of the
table is read from the nearest cache. The norm of a head is a sum within one row of the tile.
"""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from dapo.kernels._launch_triton import persistent_programs
from dapo.kernels.rotary import query_key_columns

if TYPE_CHECKING:
    from dapo.kernels.rotary import HeadNorms

_TILE = 1024  # (token, head) pairs times half a head


@triton.jit(do_not_specialize=["pairs"])
def _forward_kernel(
    x_ptr, out_ptr, positions_ptr, table_ptr, query_norm_ptr, key_norm_ptr, pairs, x_stride, out_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate ROWS (token, head) pairs per program.

    `first` and `second` are the halves of a head, HALF columns each; BLOCK is HALF rounded up to a power of two. Each
    program reads its columns before it writes them and touches no others, so `out` may be `x`.
    """
    narrow = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (pair // (HEADS + KV_HEADS)).to(tl.int64)
    head = pair % (HEADS + KV_HEADS)
    inside = (pair < pairs)[:, None] & (column < HALF)[None, :]
    within = head[:, None] * (2 * HALF) + column[None, :]  # column of the first half in a row of all heads
    first_ptr = x_ptr + token[:, None] * x_stride + within
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    if query_norm_ptr is not None:
        is_query = (head < HEADS)[:, None]
        first_weight = _weight(query_norm_ptr, key_norm_ptr, is_query, column, column < HALF)
        second_weight = _weight(query_norm_ptr + HALF, key_norm_ptr + HALF, is_query, column, column < HALF)
        rstd = _rstd(first, second, eps, HALF)
        # Rounded as the model's own norm module rounds its output, before the rotation in float32.
        first = (first * rstd * first_weight).to(narrow).to(tl.float32)
        second = (second * rstd * second_weight).to(narrow).to(tl.float32)
    if table_ptr is not None:
        position = tl.load(positions_ptr + token, mask=pair < pairs, other=0)
        cosine_ptr = table_ptr + position[:, None] * (2 * HALF) + column[None, :]
        cosine = tl.load(cosine_ptr, mask=inside, other=0.0)
        sine = tl.load(cosine_ptr + HALF, mask=inside, other=0.0)
        # Explicit fma, exactly as in decode attention: if the compiler chose where to fuse, the last bits of the
        # sampler's and the trainer's keys could differ.
        rotated_first = tl.fma(first, cosine, -(second * sine))
        second = tl.fma(second, cosine, first * sine)
        first = rotated_first
    out_first_ptr = out_ptr + token[:, None] * out_stride + within
    tl.store(out_first_ptr, first.to(narrow), mask=inside)
    tl.store(out_first_ptr + HALF, second.to(narrow), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _backward_kernel(
    grad_ptr, x_ptr, out_ptr, positions_ptr, table_ptr, query_norm_ptr, key_norm_ptr, partials_ptr,
    pairs, grad_stride, x_stride, out_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk over the tiles p, p + programs, p + 2 * programs, ... of ROWS pairs each, where p is the program.

    The forward normalizes, then rotates; so this rotates back first, then goes through the norm. Each program writes
    one row of `partials`: its share of the gradients of the query norm's and the key norm's weights.
    """
    narrow = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    # One sum per row of the tile; rows are added up only at the end.
    first_query_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    second_query_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    first_key_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    second_key_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(pairs, ROWS), tl.num_programs(0)):
        pair = tile * ROWS + tl.arange(0, ROWS)
        token = (pair // (HEADS + KV_HEADS)).to(tl.int64)
        head = pair % (HEADS + KV_HEADS)
        inside = (pair < pairs)[:, None] & (column < HALF)[None, :]
        within = head[:, None] * (2 * HALF) + column[None, :]
        first_ptr = grad_ptr + token[:, None] * grad_stride + within
        first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
        if table_ptr is not None:
            position = tl.load(positions_ptr + token, mask=pair < pairs, other=0)
            cosine_ptr = table_ptr + position[:, None] * (2 * HALF) + column[None, :]
            cosine = tl.load(cosine_ptr, mask=inside, other=0.0)
            sine = tl.load(cosine_ptr + HALF, mask=inside, other=0.0)
            rotated_first = first * cosine + second * sine
            second = second * cosine - first * sine
            first = rotated_first
        if query_norm_ptr is not None:
            is_query = (head < HEADS)[:, None]
            x_first_ptr = x_ptr + token[:, None] * x_stride + within
            first_unit = tl.load(x_first_ptr, mask=inside, other=0.0).to(tl.float32)
            second_unit = tl.load(x_first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
            rstd = _rstd(first_unit, second_unit, eps, HALF)
            first_unit *= rstd
            second_unit *= rstd
            if partials_ptr is not None:
                first_weight_grad = first * first_unit
                second_weight_grad = second * second_unit
                first_query_sum += tl.where(is_query, first_weight_grad, 0.0)
                second_query_sum += tl.where(is_query, second_weight_grad, 0.0)
                first_key_sum += tl.where(is_query, 0.0, first_weight_grad)
                second_key_sum += tl.where(is_query, 0.0, second_weight_grad)
            first *= _weight(query_norm_ptr, key_norm_ptr, is_query, column, column < HALF)
            second *= _weight(query_norm_ptr + HALF, key_norm_ptr + HALF, is_query, column, column < HALF)
            mean_product = tl.sum(first * first_unit + second * second_unit, axis=1)[:, None] / (2 * HALF)
            first = rstd * (first - first_unit * mean_product)
            second = rstd * (second - second_unit * mean_product)
        out_first_ptr = out_ptr + token[:, None] * out_stride + within
        tl.store(out_first_ptr, first.to(narrow), mask=inside)
        tl.store(out_first_ptr + HALF, second.to(narrow), mask=inside)
    if partials_ptr is not None:
        partial_ptr = partials_ptr + tl.program_id(0) * (4 * HALF) + column
        tl.store(partial_ptr, tl.sum(first_query_sum, axis=0), mask=column < HALF)
        tl.store(partial_ptr + HALF, tl.sum(second_query_sum, axis=0), mask=column < HALF)
        tl.store(partial_ptr + 2 * HALF, tl.sum(first_key_sum, axis=0), mask=column < HALF)
        tl.store(partial_ptr + 3 * HALF, tl.sum(second_key_sum, axis=0), mask=column < HALF)


@triton.jit
def _weight(query_ptr, key_ptr, is_query, column, inside):
    """Return for each row of the tile the weight of the query norm or of the key norm."""
    query = tl.load(query_ptr + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, query[None, :], key[None, :])


@triton.jit
def _rstd(first, second, eps, HALF: tl.constexpr):
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]


def rotate(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    if table is None and norms is None:
        return qk_T
    out_T = qk_T if norms is None else qk_T.new_empty(qk_T.shape)
    _check(qk_T, out_T, table, heads, kv_heads)
    half, rows, block, pairs = _sizes(qk_T, heads, kv_heads)
    query_norm, key_norm, eps = (norms.query_D, norms.key_D, norms.eps) if norms else (None, None, 0.0)
    _forward_kernel[(triton.cdiv(pairs, rows),)](
        qk_T, out_T, positions_T, table, query_norm, key_norm, pairs, qk_T.stride(0), out_T.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out_T


def rotate_backward(
    grad_qk_T: Tensor,
    qkv_T: Tensor,
    positions_T: Tensor,
    table: Tensor | None,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    norm_grads: tuple[Tensor, Tensor] | None,
    grad_qkv_T: Tensor,
) -> None:
    out_T = query_key_columns(grad_qkv_T, heads, kv_heads)
    if table is None and norms is None:
        out_T.copy_(grad_qk_T)
        return
    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    _check(grad_qk_T, out_T, table, heads, kv_heads)
    _check(qk_T, out_T, table, heads, kv_heads)
    half, rows, block, pairs = _sizes(grad_qk_T, heads, kv_heads)
    query_norm, key_norm, eps = (norms.query_D, norms.key_D, norms.eps) if norms else (None, None, 0.0)
    tiles = triton.cdiv(pairs, rows)
    programs = tiles if norm_grads is None else persistent_programs(out_T, tiles)
    partials = None if norm_grads is None else norm_grads[0].new_empty(programs, 2, 2 * half)
    _backward_kernel[(programs,)](
        grad_qk_T, qk_T, out_T, positions_T, table, query_norm, key_norm, partials,
        pairs, grad_qk_T.stride(0), qk_T.stride(0), out_T.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    if norm_grads is not None and partials is not None:
        query_grad_D, key_grad_D = partials.sum(0)
        norm_grads[0].add_(query_grad_D)
        norm_grads[1].add_(key_grad_D)


def _sizes(qk_T: Tensor, heads: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Return half a head's size, the rows and padded columns of a tile, and the number of (token, head) pairs."""
    half = qk_T.shape[1] // (heads + kv_heads) // 2
    block = triton.next_power_of_2(half)
    return half, max(1, _TILE // block), block, qk_T.shape[0] * (heads + kv_heads)


def _check(qk_T: Tensor, out_T: Tensor, table: Tensor | None, heads: int, kv_heads: int) -> None:
    assert qk_T.shape == out_T.shape, (qk_T.shape, out_T.shape)
    assert qk_T.stride(1) == out_T.stride(1) == 1
    assert qk_T.shape[1] % (2 * (heads + kv_heads)) == 0, qk_T.shape
    assert table is None or table.is_contiguous()
