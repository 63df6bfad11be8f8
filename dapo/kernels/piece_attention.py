"""Attention over packed tokens, computed page by page in the same steps as the sampler's decode attention.

bf16 rounds, so one bit that differs between sampler and trainer grows over the layers into a gap between their
log-probabilities. Both therefore fold the same pages of keys into the softmax, in the same order, with the same
operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel

PAGE = 64  # keys that are folded into the softmax at once
# Pages whose softmax is computed on its own and then merged into that of the row. One program may compute all chunks of
# a row, or several programs may share them: the operations are the same, and so are the bits.
CHUNK = 8


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of consecutive tokens in the pack whose queries see the same prefix. All tensors are int32, one entry each.

    A query sees the keys of the prefix, then the joint, then the keys of its own piece up to itself. The joint (or the
    own keys, where there is none) begins a new page.

    The pieces follow the sampler: it prefills a prompt without its last token. That last token is the first decode step
    of every response, so its key is the first one in each response's own pages. Then come the keys of the response. So
    the joint is that token, with the tokens that several responses share after it. Unused entries at the end have
    length 0.
    """

    starts: Tensor  # first token of the piece, whose queries and keys these are
    lengths: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor
    joint_starts: Tensor  # tokens whose keys stand between prefix and own keys
    joint_lengths: Tensor  # 0: none
    longest: int  # greatest length of a piece


@kernel
def piece_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D] for query [T, H, D], key and value [T, Hkv, D], and the scores' logsumexp [H, T].

    Tokens that are in no piece get zeros.
    """
    groups = query.shape[1] // key.shape[1]
    output, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    columns = (
        pieces.starts, pieces.lengths, pieces.prefix_starts, pieces.prefix_lengths, pieces.joint_starts,
        pieces.joint_lengths,
    )  # fmt: skip
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for start, length, prefix_start, prefix, joint_start, joint in rows:
        if length == 0:
            continue
        own = torch.arange(start, start + length, device=query.device)
        runs = (prefix_start, prefix), (joint_start, joint)
        before = torch.cat([torch.arange(first, first + count, device=query.device) for first, count in runs])
        keys_K = torch.cat([before, own])
        scores = torch.einsum("qhd,khd->hqk", query[own], key[keys_K].repeat_interleave(groups, dim=1)) * scale
        sees = torch.arange(len(keys_K), device=query.device) <= len(before) + (own - start)[:, None]
        scores = scores.masked_fill(~sees, float("-inf"))
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys_K].repeat_interleave(groups, dim=1))
        lse[:, own] = scores.logsumexp(-1)
    return output, lse
