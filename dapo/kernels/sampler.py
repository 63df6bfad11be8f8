"""Draw tokens: one hashed uniform per (seed, phase, group serial, sample index, position), and the inverse CDF."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.types import Phase, SamplingParams

_BLOCK = 256  # tokens whose mass is summed first


def row_key(seed: int, phase: Phase, serial: int, index: int) -> int:
    """Return the seed of one response's random numbers, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{phase}/{serial}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return one float64 in (0, 1) per row: the splitmix64 finalizer over key and position, in wrapping int64."""
    # The constants of splitmix64, written as signed integers: PyTorch has no arithmetic in uint64.
    x = keys_B + (positions_B + 1) * -0x61C8864680B583EB
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    x = x ^ _shift(x, 31)
    return (_shift(x, 12).double() + 0.5) * 2.0**-52  # 52 bits, so that no value rounds to 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, as for unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return tokens and their log-probabilities at the temperature (1 when greedy), before any truncation."""
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, logits_BV.log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
    if params.temperature != 1:
        logits_BV = logits_BV / params.temperature
    peak_B = logits_BV.amax(-1, keepdim=True)
    mass_BV = (logits_BV - peak_B).exp_()
    blocks_BNK = _in_blocks(mass_BV)
    cumulative_BN = blocks_BNK.sum(-1).double().cumsum(-1)
    if params.top_k > 0 or params.top_p < 1:
        tokens_B = _draw_truncated(mass_BV, uniforms_B, params)
    else:
        tokens_B = _invert_cdf(blocks_BNK, cumulative_BN, uniforms_B)
    chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B, (chosen_B.double() - peak_B[:, 0].double() - cumulative_BN[:, -1].log()).float()


def _in_blocks(mass_BV: Tensor) -> Tensor:
    """View the masses as [B, N, K] blocks.

    Summing blocks first is one pass over the vocabulary. The sums over blocks are then in float64, because a running
    float32 sum over the vocabulary would lose small probabilities.
    """
    vocabulary = mass_BV.shape[1]
    if vocabulary % _BLOCK:
        mass_BV = F.pad(mass_BV, (0, _BLOCK - vocabulary % _BLOCK))
    return mass_BV.view(len(mass_BV), -1, _BLOCK)


def _invert_cdf(blocks_BNK: Tensor, cumulative_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first token whose cumulative mass exceeds u * total: first its block, then its place in the block."""
    target_B = uniforms_B[:, None] * cumulative_BN[:, -1:]
    block_B = _first_above(cumulative_BN, target_B)
    before_B = F.pad(cumulative_BN, (1, 0)).gather(1, block_B)
    inside_BK = blocks_BNK.gather(1, block_B[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    return (block_B * _BLOCK + _first_above(inside_BK, target_B - before_B))[:, 0]


def _first_above(cumulative_BN: Tensor, target_B: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds the target.

    If rounding puts the target at or above the last sum, return the last index that added any mass.
    """
    last_B = (cumulative_BN < cumulative_BN[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative_BN, target_B, right=True), last_B)


def _draw_truncated(mass_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> Tensor:
    """Draw among the `top_k` likeliest tokens, or the fewest of these whose probability reaches `top_p`."""
    sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV = sorted_BV.double()
    if params.top_k > 0:
        sorted_BV[:, params.top_k :] = 0
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV[before_BV >= params.top_p * sorted_BV.sum(-1, keepdim=True)] = 0
    cumulative_BV = sorted_BV.cumsum(-1)
    return order_BV.gather(1, _first_above(cumulative_BV, uniforms_B[:, None] * cumulative_BV[:, -1:]))[:, 0]
