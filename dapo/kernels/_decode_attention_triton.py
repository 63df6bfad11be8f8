"""The Triton kernels of decode attention, which `dapo.kernels.decode_attention` documents."""

# Kernels are compiled by Triton, whose types and launch options a Python type checker does not know.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from dapo.kernels._piece_attention_triton import LOG2_E, MIN_DIMS, empty_softmax, fold, merge
from dapo.kernels.piece_attention import CHUNK

if TYPE_CHECKING:
    from dapo.kernels.decode_attention import PagedState

# (warps, pipeline stages), the fastest on an H200. With 3 stages the next page is loaded while one is computed; large
# pages would need too much shared memory for that. With huge ones, a GPU for desktops has room for one stage only.
_SMALL, _LARGE, _HUGE = (1, 3), (2, 2), (2, 1)
_LARGE_PAGE, _HUGE_PAGE = 8 * 1024, 32 * 1024  # bytes of one head's keys above which a page is large, or huge
_MIN_ROWS = 16  # smallest height of a product on tensor cores; the query heads of one key head are padded to it


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    state: PagedState,
    scale: float,
    *,
    cos_sin: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    batch, heads, head_dim = query.shape
    _, kv_heads, page, _ = keys.shape
    group = heads // kv_heads
    warps, stages = warps_and_stages(page * head_dim * keys.element_size())
    assert heads == group * kv_heads and key.shape == value.shape == (batch, kv_heads, head_dim)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert keys.is_contiguous() and values.is_contiguous() and state.table.stride(1) == 1
    output = torch.empty(batch, heads, head_dim, dtype=query.dtype, device=query.device)
    # With `split`, each chunk leaves its weighted sum of values, and the sum and peak of its softmax, for _combine.
    # Without, the kernel writes the output directly and does not touch `sums` and `peaks`.
    sums = peaks = partial = output
    chunks = triton.cdiv(state.table.shape[1], CHUNK) if split else 1
    if split:
        partial = torch.empty(batch, heads, chunks, head_dim, dtype=torch.float32, device=query.device)
        sums, peaks = torch.empty(2, batch, heads, chunks, dtype=torch.float32, device=query.device)
    sizes = {
        "GROUP": group,
        "ROWS": max(_MIN_ROWS, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "DIMS": max(MIN_DIMS, triton.next_power_of_2(head_dim)),
    }
    _attend[kv_heads, batch, chunks](
        query,
        key,
        value,
        keys,
        values,
        state.rows_B,
        state.table,
        state.prompt_lengths,
        state.own_lengths,
        cos_sin,
        partial,
        sums,
        peaks,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        state.table.stride(0),
        state.table.shape[1],
        cos_sin.stride(0) if cos_sin is not None else 0,
        scale * LOG2_E,
        PAGE=page,
        CHUNK=CHUNK,
        SPLIT=split,
        num_warps=warps,
        num_stages=stages,
        **sizes,
    )
    if split:
        _combine[kv_heads, batch](partial, sums, peaks, output, chunks, scale * LOG2_E, num_warps=1, **sizes)
    return output


def warps_and_stages(page_bytes: int) -> tuple[int, int]:
    if page_bytes > _HUGE_PAGE:
        return _HUGE
    return _LARGE if page_bytes > _LARGE_PAGE else _SMALL


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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend with the GROUP query heads of one key head of one response, over all its pages or one chunk of them.

    Grid: (key heads, places of the batch, chunks). The query heads are the rows of one matrix, so that each page is
    read once for all of them. `scale` includes log2(e), because the softmax uses exp2.
    """
    head = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    # Loads that depend on each other: the row, then its lengths and first page number, then that page. The loads and
    # arithmetic that depend on none of these come in between, to overlap with the waiting.
    row = tl.load(rows_B + place).to(tl.int64)
    slots = tl.arange(0, PAGE)
    dims = tl.arange(0, DIMS)
    members = tl.arange(0, ROWS)
    heads = head * GROUP + members[:, None]
    is_member = members[:, None] < GROUP
    # The new key and value are loaded as [ROWS, DIMS] with equal rows, like the queries. All then have one layout, and
    # nothing has to be moved between threads.
    columns = tl.broadcast_to(dims[None, :], [ROWS, DIMS])
    inside = columns < HEAD_DIM  # a head of 80 or 96 is padded to a power of two
    query += place * query_place
    key += place * key_place + head * key_head
    q = tl.load(query + heads * query_head + columns, mask=is_member & inside, other=0.0)
    new_key = tl.load(key + columns, mask=inside, other=0.0)
    new_value = tl.load(value + place * value_place + head * value_head + columns, mask=inside, other=0.0)
    if cos_sin is not None:
        half: tl.constexpr = HEAD_DIM // 2
        # The other half of each rotated pair is loaded a second time instead of being exchanged between threads. The
        # index is written so that the compiler sees contiguous addresses.
        partner = columns % half + tl.where(columns < half, half, 0)
        q_partner = tl.load(query + heads * query_head + partner, mask=is_member & inside, other=0.0)
        key_partner = tl.load(key + partner, mask=inside, other=0.0)

    pages = table + row * table_row
    prompt = tl.load(prompt_lengths + row)
    own = tl.load(own_lengths + row)
    prompt_pages = tl.cdiv(prompt, PAGE)
    last = prompt_pages + tl.cdiv(own, PAGE)  # one past the last page
    first_chunk, last_chunk = 0, tl.cdiv(last, CHUNK)
    if SPLIT:
        first_chunk = tl.program_id(2)
        last_chunk = tl.minimum(first_chunk + 1, last_chunk)  # a chunk beyond the end loops over nothing
    # A program beyond the end must still read inside the table.
    page = tl.load(pages + tl.minimum(first_chunk * CHUNK, table_width - 1))

    if cos_sin is not None:
        cos_sin += (prompt + own - 1) * cos_sin_row  # the position of the newest token
        cos = tl.load(cos_sin + columns % half)
        sin = tl.load(cos_sin + half + columns % half)
        sin = tl.where(columns < half, -sin, sin)
        q = _rotated(q, q_partner, cos, sin)
        new_key = _rotated(new_key, key_partner, cos, sin)

    # The program that attends to the last page stores the newest token, and then reads it from the cache with the other
    # keys: rounded as every later step will read it. Programs beyond the end store it too, with the same bits.
    if last_chunk * CHUNK >= last:
        newest_page = tl.load(pages + last - 1).to(tl.int64)
        home = ((newest_page * tl.num_programs(0) + head) * PAGE + (own - 1) % PAGE) * HEAD_DIM
        is_first = (members[:, None] == 0) & inside
        tl.store(keys + home + columns, new_key, mask=is_first)
        tl.store(values + home + columns, new_value, mask=is_first)
    tl.debug_barrier()  # the store above must be visible to all threads of the program before the loop loads the page

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, DIMS], tl.float32)
    tile = head * PAGE * HEAD_DIM + slots[:, None] * HEAD_DIM + dims[None, :]
    for chunk in range(first_chunk, last_chunk):
        chunk_peak, chunk_total, chunk_sum = empty_softmax(ROWS, DIMS)
        for index in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, last)):
            # Slots beyond the end may hold anything, even NaN, so they are masked out of the load.
            left = tl.where(index >= prompt_pages, own - (index - prompt_pages) * PAGE, prompt - index * PAGE)
            is_key = slots < left
            is_read = is_key[:, None]
            if DIMS != HEAD_DIM:
                is_read = is_read & (dims[None, :] < HEAD_DIM)
            start = page.to(tl.int64) * (tl.num_programs(0) * PAGE * HEAD_DIM)
            k = tl.load(keys + start + tile, mask=is_read, other=0.0)
            v = tl.load(values + start + tile, mask=is_read, other=0.0)
            page = tl.load(pages + tl.minimum(index + 1, table_width - 1))  # one iteration ahead of its use
            sees = tl.broadcast_to(is_key[None, :], [ROWS, PAGE])
            chunk_peak, chunk_total, chunk_sum = fold(q, k, v, sees, chunk_peak, chunk_total, chunk_sum, scale)
        # The columns of chunk_total are equal, so the maximum just picks one.
        peak, total, sum_ = merge(peak, total, sum_, chunk_peak, tl.max(chunk_total, axis=1), chunk_sum, scale)

    if SPLIT:
        # One chunk was merged into an empty softmax, which changed no bit. `sums` and `peaks` are [B, H, chunks].
        lines = (place * (tl.num_programs(0) * GROUP) + head * GROUP + members) * tl.num_programs(2) + first_chunk
        tl.store(sums + lines, total, mask=members < GROUP)
        tl.store(peaks + lines, peak, mask=members < GROUP)
        tl.store(output + lines[:, None] * HEAD_DIM + dims[None, :], sum_, mask=is_member & inside)
    else:
        line = place * (tl.num_programs(0) * GROUP) + heads
        sum_ = (sum_ / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + line * HEAD_DIM + dims[None, :], sum_, mask=is_member & inside)


@triton.jit
def _rotated(x, partner, cos, sin):
    """Rotate with the same operations as `dapo.kernels._rotary_triton`, so that the bits are the same."""
    return tl.fma(x.to(tl.float32), cos, partner.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _combine(
    partial, sums, peaks, output, chunks, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of the GROUP query heads of one key head of one response.

    The order is that of the loop in _attend, first chunk first. A chunk without pages has peak -inf and sum 0; it
    changes no bit.
    """
    dims = tl.arange(0, DIMS)
    members = tl.arange(0, ROWS)
    is_member = members < GROUP
    inside = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    # Rows of the output [B, H, D]; the chunks of row l are at l * chunks, l * chunks + 1, ... of the partial results.
    line = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * GROUP + members
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, DIMS], tl.float32)
    for chunk in range(chunks):
        part = line * chunks + chunk
        chunk_peak = tl.load(peaks + part, mask=is_member, other=float("-inf"))
        chunk_total = tl.load(sums + part, mask=is_member, other=0.0)
        chunk_sum = tl.load(partial + part[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        peak, total, sum_ = merge(peak, total, sum_, chunk_peak, chunk_total, chunk_sum, scale)
    sum_ = (sum_ / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + line[:, None] * HEAD_DIM + dims[None, :], sum_, mask=inside)
