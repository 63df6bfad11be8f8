"""Attention over packed tokens, computed page by page in the very steps in which a sampler computes it.

bf16 rounds, and one bit that differs between sampler and trainer grows over the layers into a gap between their
log-probabilities. So both fold pages of keys into the softmax in the same order, with the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # keys folded into the softmax at once
CHUNK = 8  # pages whose softmax is computed by itself, and then merged into the whole: so splitting changes no bit


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of queries in the pack. Each sees a prefix, then, from a fresh page on, the joint, then itself causally.

    A sampler computes a prompt but for its last token, the joint, which is the first step of every response. All
    tensors are int32 with one entry per piece; those beyond the last piece have length 0.
    """

    starts: Tensor  # of the queries, and of their keys
    lengths: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor
    joints: Tensor  # one key between prefix and own; -1: none
    longest: int  # length of a piece


def piece_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
    """The output [T, H, D] for query [T, H, D], key and value [T, Hkv, D], and the logsumexp [H, T] of the scores."""
    attend = piece_attention_triton if query.is_cuda else piece_attention_torch
    return attend(query, key, value, pieces, scale)


def piece_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float
) -> tuple[Tensor, Tensor]:
    from dapo.kernels import _piece_attention_triton as _attention_triton  # Triton is not installed everywhere

    return _attention_triton.launch(query, key, value, pieces, scale)


def piece_attention_torch(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float
) -> tuple[Tensor, Tensor]:
    """The twin of the kernel in plain PyTorch. Tokens of no piece get nothing."""
    groups = query.shape[1] // key.shape[1]
    output, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    columns = (pieces.starts, pieces.lengths, pieces.prefix_starts, pieces.prefix_lengths, pieces.joints)
    for start, length, prefix_start, prefix, joint in zip(*(column.tolist() for column in columns), strict=True):
        if length == 0:
            continue
        own = torch.arange(start, start + length, device=query.device)
        before = torch.arange(prefix_start, prefix_start + prefix, device=query.device)
        before = torch.cat([before, before.new_tensor([joint] if joint >= 0 else [])])
        keys_K = torch.cat([before, own])
        scores = torch.einsum("qhd,khd->hqk", query[own], key[keys_K].repeat_interleave(groups, dim=1)) * scale
        sees = torch.arange(len(keys_K), device=query.device) <= len(before) + (own - start)[:, None]
        scores = scores.masked_fill(~sees, float("-inf"))
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys_K].repeat_interleave(groups, dim=1))
        lse[:, own] = scores.logsumexp(-1)
    return output, lse
