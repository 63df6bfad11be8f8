"""The Triton kernel of attention over packed tokens, and the softmax steps that it shares with decode attention."""

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

# Fastest on an H200. Tiles of 16 to 128 rows in 1 to 8 warps all give the same bits.
ROWS = 64  # queries of a program
NUM_WARPS = 4
NUM_STAGES = 2
_WIDE = 128  # larger heads get fewer rows, or a program would need more shared memory than a GPU for desktops has
MIN_DIMS = 16  # smallest inner dimension of a product on tensor cores
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_SUM_COLUMNS: tl.constexpr = tl.constexpr(16)  # smallest width of a product on tensor cores


@triton.jit
def fold(q, k, v, sees, peak, total, sum_, scale):
    """Fold one page of keys and values into the running softmax of some query rows.

    q is [ROWS, DIMS], k and v are [PAGE, DIMS]; sees [ROWS, PAGE] tells whether a row sees a key. The running softmax
    of a row is `peak` [ROWS], its highest score, unscaled; `total` [ROWS, _SUM_COLUMNS], the sum of its weights, the
    same in every column; `sum_` [ROWS, DIMS], the weighted sum of the values. `scale` includes log2(e).

    The sampler and the trainer call this with different tiles, and must get the same bits. So a row's result may depend
    neither on the other rows nor on how threads share the work: sums over keys are products on tensor cores, whose
    order does not depend on the tile, and each multiply-add is an explicit fma.
    """
    scores = tl.where(sees, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen no key yet has peak -inf; subtracting 0 instead avoids -inf - -inf = NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2((peak - level) * scale)[:, None]
    # Rounded to v's dtype before both sums, so that numerator and denominator use the same weights.
    weights = tl.exp2(tl.fma(scores, scale, -(level * scale)[:, None])).to(v.dtype)
    # A product with ones instead of tl.sum: the order of tl.sum depends on how a tile is laid out over threads.
    ones = tl.full([k.shape[0], _SUM_COLUMNS], 1.0, v.dtype)
    total = tl.dot(weights, ones, total * shrink, input_precision="ieee")
    sum_ = tl.dot(weights, v, sum_ * shrink, input_precision="ieee")
    return higher, total, sum_


@triton.jit
def merge(peak, total, sum_, chunk_peak, chunk_total, chunk_sum, scale):
    """Merge the softmax of a chunk into that of the chunks before it. Here the totals are [ROWS].

    A part that has seen no key (peak -inf, sums 0) changes no bit of the other: it adds 0 to 1 times the other.
    """
    higher = tl.maximum(peak, chunk_peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2((peak - level) * scale), tl.exp2((chunk_peak - level) * scale)
    total = tl.fma(total, old, chunk_total * new)
    sum_ = tl.fma(sum_, old[:, None], chunk_sum * new[:, None])
    return higher, total, sum_


@triton.jit
def empty_softmax(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return the running softmax of a chunk before its first page."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS, _SUM_COLUMNS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit
def _attend(
    query, key, value, output, lse, starts, lengths, prefix_starts, prefix_lengths, joint_starts, joint_lengths,
    query_token, query_head, key_token, key_head, value_token, value_head, tokens, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS consecutive queries of one head of one piece.

    Grid: (query heads, tiles of the longest piece, pieces). Keys and values are read page by page where they lie in the
    pack: the pages of the prefix, then the own pages, whose first slots are the joint if there is one.
    """
    head, tile, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + piece)
    if tile * ROWS >= length:  # the grid is sized for the longest piece
        return
    start, prefix_start = tl.load(starts + piece), tl.load(prefix_starts + piece)
    prefix = tl.load(prefix_lengths + piece)
    joint_start, joint = tl.load(joint_starts + piece), tl.load(joint_lengths + piece)
    dims, slots = tl.arange(0, DIMS), tl.arange(0, PAGE)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = (rows < length)[:, None]
    is_dim = (dims < HEAD_DIM)[None, :]
    line = (start + rows).to(tl.int64)[:, None]  # token of each query in the pack
    q = tl.load(query + line * query_token + head * query_head + dims[None, :], mask=is_row & is_dim, other=0.0)
    key += (head // GROUP) * key_head  # GROUP query heads share a key head
    value += (head // GROUP) * value_head

    prefix_pages = tl.cdiv(prefix, PAGE)
    # The own slot of the tile's last query. Pages beyond it are seen by none of the tile's queries.
    last = tl.minimum(tile * ROWS + ROWS, length) - 1 + joint
    pages = prefix_pages + last // PAGE + 1
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, DIMS], tl.float32)
    for chunk in range(tl.cdiv(pages, CHUNK)):
        chunk_peak, chunk_total, chunk_sum = empty_softmax(ROWS, DIMS)
        for index in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, pages)):
            is_own = index >= prefix_pages
            # `slot` counts keys within the prefix or within the own keys; `token` is where the key lies in the pack.
            slot = (index - tl.where(is_own, prefix_pages, 0)) * PAGE + slots
            own = tl.where(slot < joint, joint_start + slot, start + slot - joint)
            token = tl.where(is_own, own, prefix_start + slot).to(tl.int64)[:, None]
            is_key = slot < tl.where(is_own, length + joint, prefix)
            is_read = is_key[:, None] & is_dim
            k = tl.load(key + token * key_token + dims[None, :], mask=is_read, other=0.0)
            v = tl.load(value + token * value_token + dims[None, :], mask=is_read, other=0.0)
            # Causal within the own keys: query r sees the own slots up to r + joint. Every query sees the prefix.
            reach = tl.where(is_own, rows + joint, prefix)
            sees = is_key[None, :] & (slot[None, :] <= reach[:, None])
            chunk_peak, chunk_total, chunk_sum = fold(q, k, v, sees, chunk_peak, chunk_total, chunk_sum, scale)
        # The columns of chunk_total are equal, so the maximum just picks one.
        peak, total, sum_ = merge(peak, total, sum_, chunk_peak, tl.max(chunk_total, axis=1), chunk_sum, scale)

    output += line * (tl.num_programs(0) * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    tl.store(output, (sum_ / total[:, None]).to(output.dtype.element_ty), mask=is_row & is_dim)
    # The peak is unscaled, and scale includes log2(e): back to natural logarithms.
    tl.store(lse + head * tokens + start + rows, (peak * scale + tl.log2(total)) * _LN_2, mask=rows < length)


def piece_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    assert heads % kv_heads == 0 and key.shape == value.shape == (tokens, kv_heads, head_dim)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    output = torch.zeros(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.zeros(heads, tokens, dtype=torch.float32, device=query.device)
    rows = rows_for(head_dim)
    _attend[heads, triton.cdiv(pieces.longest, rows), len(pieces.starts)](
        query, key, value, output, lse,
        pieces.starts, pieces.lengths, pieces.prefix_starts, pieces.prefix_lengths, pieces.joint_starts,
        pieces.joint_lengths,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], tokens, scale * LOG2_E,
        GROUP=heads // kv_heads, ROWS=rows, HEAD_DIM=head_dim, DIMS=max(MIN_DIMS, triton.next_power_of_2(head_dim)),
        PAGE=PAGE, CHUNK=CHUNK, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return output, lse


def rows_for(head_dim: int) -> int:
    return ROWS if head_dim <= _WIDE else ROWS // 2
