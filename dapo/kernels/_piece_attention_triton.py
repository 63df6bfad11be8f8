"""The Triton kernel of attention over packed tokens, and the steps that it has in common with a sampler's."""

# Triton's own annotations do not fit how its kernels are called.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.kernels.piece_attention import CHUNK, PAGE

if TYPE_CHECKING:
    from dapo.kernels.piece_attention import Pieces

# Measured on an H200, where tiles of 16 to 128 rows in 1 to 8 warps all give the same bits.
ROWS = 64
NUM_WARPS = 4
NUM_STAGES = 2
MIN_DIMS = 16  # of a product on tensor cores
LOG2_E = 1.4426950408889634
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_SUM_COLUMNS: tl.constexpr = tl.constexpr(16)


@triton.jit
def fold(q, k, v, sees, peak, total, sum_, scale):
    """A page of keys and values into the softmax of some rows. `scale` is in units of log 2; `peak` is not scaled.

    Written so that a row's result depends neither on the other rows nor on how threads share the work: sums are
    products on tensor cores, multiplications with additions are fused by order.
    """
    scores = tl.where(sees, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have seen nothing yet
    shrink = tl.exp2((peak - level) * scale)[:, None]
    weights = tl.exp2(tl.fma(scores, scale, -(level * scale)[:, None])).to(v.dtype)
    ones = tl.full([k.shape[0], _SUM_COLUMNS], 1.0, v.dtype)
    total = tl.dot(weights, ones, total * shrink, input_precision="ieee")
    sum_ = tl.dot(weights, v, sum_ * shrink, input_precision="ieee")
    return higher, total, sum_


@triton.jit
def merge(peak, total, sum_, chunk_peak, chunk_total, chunk_sum, scale):
    """Two parts of a softmax; one that has seen nothing changes no bit of the other."""
    higher = tl.maximum(peak, chunk_peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2((peak - level) * scale), tl.exp2((chunk_peak - level) * scale)
    total = tl.fma(total, old, chunk_total * new)
    sum_ = tl.fma(sum_, old[:, None], chunk_sum * new[:, None])
    return higher, total, sum_


@triton.jit
def nothing(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The softmax of a chunk before its first page."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS, _SUM_COLUMNS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit
def _attend(
    query, key, value, output, lse, starts, lengths, prefix_starts, prefix_lengths, joints,
    query_token, query_head, key_token, key_head, value_token, value_head, tokens, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Some queries of one head of one piece."""
    head, tile, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + piece)
    if tile * ROWS >= length:
        return
    start, prefix_start = tl.load(starts + piece), tl.load(prefix_starts + piece)
    prefix, joint = tl.load(prefix_lengths + piece), tl.load(joints + piece)
    has_joint = (joint >= 0).to(tl.int32)
    dims, slots = tl.arange(0, DIMS), tl.arange(0, PAGE)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = (rows < length)[:, None]
    is_dim = (dims < HEAD_DIM)[None, :]
    line = (start + rows).to(tl.int64)[:, None]
    q = tl.load(query + line * query_token + head * query_head + dims[None, :], mask=is_row & is_dim, other=0.0)
    key += (head // GROUP) * key_head
    value += (head // GROUP) * value_head

    prefix_pages = tl.cdiv(prefix, PAGE)
    last = tl.minimum(tile * ROWS + ROWS, length) - 1 + has_joint
    pages = prefix_pages + last // PAGE + 1
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, DIMS], tl.float32)
    for chunk in range(tl.cdiv(pages, CHUNK)):
        chunk_peak, chunk_total, chunk_sum = nothing(ROWS, DIMS)
        for index in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, pages)):
            is_own = index >= prefix_pages
            slot = (index - tl.where(is_own, prefix_pages, 0)) * PAGE + slots
            own = tl.where((slot == 0) & (has_joint == 1), joint, start + slot - has_joint)
            token = tl.where(is_own, own, prefix_start + slot).to(tl.int64)[:, None]
            there = slot < tl.where(is_own, length + has_joint, prefix)
            is_read = there[:, None] & is_dim
            k = tl.load(key + token * key_token + dims[None, :], mask=is_read, other=0.0)
            v = tl.load(value + token * value_token + dims[None, :], mask=is_read, other=0.0)
            reach = tl.where(is_own, rows + has_joint, prefix)
            sees = there[None, :] & (slot[None, :] <= reach[:, None])
            chunk_peak, chunk_total, chunk_sum = fold(q, k, v, sees, chunk_peak, chunk_total, chunk_sum, scale)
        peak, total, sum_ = merge(peak, total, sum_, chunk_peak, tl.max(chunk_total, axis=1), chunk_sum, scale)

    output += line * (tl.num_programs(0) * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    tl.store(output, (sum_ / total[:, None]).to(output.dtype.element_ty), mask=is_row & is_dim)
    tl.store(lse + head * tokens + start + rows, (peak * scale + tl.log2(total)) * _LN_2, mask=rows < length)


def launch(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    assert heads % kv_heads == 0 and key.shape == value.shape == (tokens, kv_heads, head_dim)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    output = torch.zeros(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.zeros(heads, tokens, dtype=torch.float32, device=query.device)
    _attend[heads, triton.cdiv(pieces.longest, ROWS), len(pieces.starts)](
        query, key, value, output, lse,
        pieces.starts, pieces.lengths, pieces.prefix_starts, pieces.prefix_lengths, pieces.joints,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], tokens, scale * LOG2_E,
        GROUP=heads // kv_heads, ROWS=ROWS, HEAD_DIM=head_dim, DIMS=max(MIN_DIMS, triton.next_power_of_2(head_dim)),
        PAGE=PAGE, CHUNK=CHUNK, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return output, lse
