"""The Triton kernels of decode attention; `dapo.engine.embedded.kernels.attention` says what they compute."""

# Kernels are compiled by Triton, whose types and launch options a Python type checker does not know.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dapo.engine.embedded.kernels.attention import PagedState
    from dapo.model.attention import Rotary

# Measured on an H200. With 3 stages the next page is on its way while one is worked on; large pages would cost too much
# shared memory.
NUM_WARPS = 2
NUM_STAGES = 3
NUM_STAGES_LARGE = 2
LARGE_PAGE = 8 * 1024  # bytes of one head's keys above which a page is large
_MIN_ROWS = 16  # of a matrix product on tensor cores; the query heads of one key head are padded to it
_MIN_DIMS = 16  # of a product, too
_LOG2_E = 1.4426950408889634


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    state: PagedState,
    scale: float,
    rotary: Rotary | None,
    splits: int,
) -> Tensor:
    batch, heads, head_dim = query.shape
    _, kv_heads, page, _ = keys.shape
    group = heads // kv_heads
    is_large = page * head_dim * keys.element_size() > LARGE_PAGE
    dims = max(_MIN_DIMS, triton.next_power_of_2(head_dim))
    assert heads == group * kv_heads and key.shape == value.shape == (batch, kv_heads, head_dim)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert keys.is_contiguous() and values.is_contiguous() and state.table.stride(1) == 1
    output = torch.empty(batch, heads, head_dim, dtype=query.dtype, device=query.device)
    # Per split: the accumulator, then the sum and the peak of its softmax.
    sums = peaks = partial = output
    if splits > 1:
        partial = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        sums, peaks = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=query.device)
    _attend[kv_heads, batch, splits](
        query,
        key,
        value,
        keys,
        values,
        state.rows_B,
        state.table,
        state.prompt_lengths,
        state.own_lengths,
        rotary.table if rotary is not None else None,
        rotary.query_norm if rotary is not None else None,
        rotary.key_norm if rotary is not None else None,
        partial,
        sums,
        peaks,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        state.table.stride(0),
        state.table.shape[1],
        rotary.table.stride(0) if rotary is not None and rotary.table is not None else 0,
        scale * _LOG2_E,
        rotary.eps if rotary is not None else 0.0,
        GROUP=group,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE=page,
        DIMS=dims,
        SPLITS=splits,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES_LARGE if is_large else NUM_STAGES,
    )
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _combine[heads, batch](
            partial, sums, peaks, output, splits, HEAD_DIM=head_dim, DIMS=dims, SPLITS=padded, num_warps=1
        )
    return output


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    rows_B,
    table,
    prompt_lengths,
    own_lengths,
    cos_sin,
    query_norm,
    key_norm,
    output,
    sums,
    peaks,
    query_place,
    query_head,
    key_place,
    key_head,
    value_place,
    value_head,
    table_row,
    table_width,
    cos_sin_row,
    scale,
    eps,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One key head of one response, and a share of its pages. Scores are in units of log 2."""
    head = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = tl.load(rows_B + place).to(tl.int64)  # first of a chain: row, then lengths and page number, then page
    slots = tl.arange(0, PAGE)
    dims = tl.arange(0, DIMS)
    members = tl.arange(0, ROWS)
    heads = head * GROUP + members[:, None]
    is_member = members[:, None] < GROUP
    # Whatever meets the queries is as large as they are, though its rows are the same: one layout, no data moved.
    columns = tl.broadcast_to(dims[None, :], [ROWS, DIMS])
    inside = columns < HEAD_DIM  # a head of 80 or 96 is padded to a power of two
    query += place * query_place
    key += place * key_place + head * key_head
    q = tl.load(query + heads * query_head + columns, mask=is_member & inside, other=0.0)
    new_key = tl.load(key + columns, mask=inside, other=0.0)
    new_value = tl.load(value + place * value_place + head * value_head + columns, mask=inside, other=0.0)
    if cos_sin is not None:
        half: tl.constexpr = HEAD_DIM // 2
        # Partners in the rotation are read rather than exchanged, at places whose contiguity the compiler can see.
        partner = columns % half + tl.where(columns < half, half, 0)
        q_partner = tl.load(query + heads * query_head + partner, mask=is_member & inside, other=0.0)
        key_partner = tl.load(key + partner, mask=inside, other=0.0)

    pages = table + row * table_row
    prompt = tl.load(prompt_lengths + row)
    cached = tl.load(own_lengths + row) - 1
    prompt_pages = tl.cdiv(prompt, PAGE)
    newest = prompt + cached
    first, last = 0, prompt_pages + tl.cdiv(cached, PAGE)
    if SPLITS > 1:
        share = tl.cdiv(last, SPLITS)
        first = split * share
        last = tl.minimum(first + share, last)
    page = tl.load(pages + tl.minimum(first, table_width - 1))

    if cos_sin is not None:
        cos_sin += newest * cos_sin_row
        cos = tl.load(cos_sin + columns % half)
        sin = tl.load(cos_sin + half + columns % half)
        sin = tl.where(columns < half, -sin, sin)
        q = _rotated(q, q_partner, query_norm, columns, partner, cos, sin, eps, HEAD_DIM)
        new_key = _rotated(new_key, key_partner, key_norm, columns, partner, cos, sin, eps, HEAD_DIM)

    # The newest token starts the softmax of the last split, which has the fewest pages, and is stored by it.
    takes_newest = split == SPLITS - 1
    score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    peak = tl.where(takes_newest, score, float("-inf"))
    # Summed slot by slot, and over the slots only at the end: sums across warps are what a page waits for.
    totals = tl.where(takes_newest & (slots[None, :] == 0), 1.0, 0.0) + tl.zeros([ROWS, PAGE], tl.float32)
    sum_ = tl.where(takes_newest, new_value.to(tl.float32), 0.0)
    if takes_newest:
        newest_page = tl.load(pages + prompt_pages + cached // PAGE).to(tl.int64)
        home = ((newest_page * tl.num_programs(0) + head) * PAGE + cached % PAGE) * HEAD_DIM
        is_first = (members[:, None] == 0) & inside
        tl.store(keys + home + columns, new_key, mask=is_first)
        tl.store(values + home + columns, new_value, mask=is_first)

    tile = head * PAGE * HEAD_DIM + slots[:, None] * HEAD_DIM + dims[None, :]
    for index in range(first, last):
        # Slots beyond the end hold anything, also NaN, so they are not read.
        is_own = index >= prompt_pages
        left = tl.where(is_own, cached - (index - prompt_pages) * PAGE, prompt - index * PAGE)
        is_there = slots < left
        is_read = is_there[:, None]
        if DIMS != HEAD_DIM:
            is_read = is_read & (dims[None, :] < HEAD_DIM)
        start = page.to(tl.int64) * (tl.num_programs(0) * PAGE * HEAD_DIM)
        k = tl.load(keys + start + tile, mask=is_read, other=0.0)
        v = tl.load(values + start + tile, mask=is_read, other=0.0)
        page = tl.load(pages + tl.minimum(index + 1, table_width - 1))  # a step ahead of its use
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        totals = totals * shrink[:, None] + weights
        sum_ = tl.dot(weights.to(v.dtype), v, sum_ * shrink[:, None], input_precision="ieee")
        peak = higher

    total = tl.sum(totals, axis=1)
    line = (place * (tl.num_programs(0) * GROUP) + heads) * SPLITS + split
    if SPLITS == 1:
        sum_ = sum_ / total[:, None]
    else:
        flat = (place * (tl.num_programs(0) * GROUP) + head * GROUP + members) * SPLITS + split
        tl.store(sums + flat, total, mask=members < GROUP)
        tl.store(peaks + flat, peak, mask=members < GROUP)
    tl.store(output + line * HEAD_DIM + dims[None, :], sum_.to(output.dtype.element_ty), mask=is_member & inside)


@triton.jit
def _rotated(x, partner, norm, dims, partner_dims, cos, sin, eps, HEAD_DIM: tl.constexpr):
    """Heads x [rows, D] after the norm, if there is one, and the rotation with their partners."""
    if norm is not None:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        x = (wide * factor * tl.load(norm + dims % HEAD_DIM).to(tl.float32)).to(x.dtype)
        partner = (partner.to(tl.float32) * factor * tl.load(norm + partner_dims % HEAD_DIM).to(tl.float32)).to(x.dtype)
    return (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _combine(partial, sums, peaks, output, count, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    """One head of one response. A split without pages has peak -inf and sum 0; the newest token makes one finite."""
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    dims = tl.arange(0, DIMS)
    splits = tl.arange(0, SPLITS)
    exists = splits < count
    splits += line * count
    peak = tl.load(peaks + splits, mask=exists, other=float("-inf"))
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(sums + splits, mask=exists, other=0.0), axis=0)
    parts = tl.load(
        partial + splits[:, None] * HEAD_DIM + dims[None, :],
        mask=exists[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    mixed = tl.sum(parts * weight[:, None], axis=0) / total
    tl.store(output + line * HEAD_DIM + dims, mixed.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
