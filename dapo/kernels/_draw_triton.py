"""The Triton kernels that draw tokens without truncation, reading the logits about once.

The first kernel reduces each block of logits to its highest one and its sum. The second picks a block from these sums,
and then reads only that block again to pick the token in it.
"""

# Kernels are compiled by Triton, whose types and launch options a Python type checker does not know.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dapo.kernels.draw import DrawState
    from dapo.types import SamplingParams

BLOCK = 4096  # logits
SUM_WARPS = 4
DRAW_WARPS = 8


def draw_and_advance(logits_BV: Tensor, rows_B: Tensor, state: DrawState, params: SamplingParams) -> None:
    batch, vocabulary = logits_BV.shape
    assert logits_BV.stride(1) == 1
    blocks = triton.cdiv(vocabulary, BLOCK)
    peaks, sums = torch.empty(2, batch, blocks, dtype=torch.float32, device=logits_BV.device)
    divisor = float(params.temperature) or 1.0  # greedy draws report log-probabilities at temperature 1
    _sum_blocks[blocks, batch](
        logits_BV,
        logits_BV.stride(0),
        vocabulary,
        divisor,
        rows_B,
        state.finished,
        peaks,
        sums,
        BLOCK=BLOCK,
        num_warps=SUM_WARPS,
    )
    stops = len(state.stop_ids)
    _draw[batch,](
        logits_BV,
        logits_BV.stride(0),
        vocabulary,
        divisor,
        rows_B,
        state.finished,
        peaks,
        sums,
        blocks,
        state.keys,
        state.own_lengths,
        state.limits,
        state.tokens,
        state.tokens.stride(0),
        state.logprobs,
        state.logprobs.stride(0),
        state.stop_ids,
        stops,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        STOPS=triton.next_power_of_2(max(1, stops)),
        GREEDY=params.temperature == 0,
        num_warps=DRAW_WARPS,
    )


@triton.jit
def _sum_blocks(logits, logits_place, vocabulary, temperature, rows_B, finished, peaks, sums, BLOCK: tl.constexpr):
    """Write the highest logit of one block of one response, and the sum of exp(logit - highest). Grid: (blocks, B)."""
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    if tl.load(finished + tl.load(rows_B + place)) != 0:
        return
    x = _scaled(logits + place * logits_place, block, vocabulary, temperature, BLOCK)
    peak = tl.max(x, axis=0)
    line = place * tl.num_programs(0) + block
    tl.store(peaks + line, peak)
    tl.store(sums + line, tl.sum(_mass(x, peak), axis=0))


@triton.jit
def _draw(
    logits,
    logits_place,
    vocabulary,
    temperature,
    rows_B,
    finished,
    peaks,
    sums,
    blocks,
    keys,
    own_lengths,
    limits,
    tokens,
    tokens_row,
    logprobs,
    logprobs_row,
    stop_ids,
    stops,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STOPS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Draw the next token of one response by the inverse CDF, append it, and update the response's state. Grid: (B,).

    Two levels: the first block whose cumulative mass exceeds u * total, then the first token in it. Names with _N have
    one entry per block. Masses are relative to exp(peak), in float64.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_B + place).to(tl.int64)
    # A finished row writes nothing: it may stand in the batch several times.
    if tl.load(finished + row) != 0:
        return
    own = tl.load(own_lengths + row)
    block_index = tl.arange(0, BLOCKS)
    peak_N = tl.load(peaks + place * blocks + block_index, mask=block_index < blocks, other=float("-inf"))
    sum_N = tl.load(sums + place * blocks + block_index, mask=block_index < blocks, other=0.0)
    peak = tl.max(peak_N, axis=0)
    mass_N = sum_N.to(tl.float64) * tl.exp((peak_N - peak).to(tl.float64))
    cumulative_N = tl.cumsum(mass_N, axis=0)
    total = tl.sum(mass_N, axis=0)  # NaN if any logit is, and then the log-probability shows it
    target = _uniform(tl.load(keys + row), own) * total
    if GREEDY:
        # The first of equal logits, as argmax takes it.
        block = tl.min(tl.where(peak_N == peak, block_index, BLOCKS - 1), axis=0)
    else:
        block = _first_above(cumulative_N, mass_N, target, block_index)
    block = tl.minimum(block, blocks - 1)  # even NaN logits must give a token of the vocabulary

    block_peak = tl.sum(tl.where(block_index == block, peak_N, 0.0), axis=0)
    before = tl.sum(tl.where(block_index == block - 1, cumulative_N, 0.0), axis=0)
    x = _scaled(logits + place * logits_place, block, vocabulary, temperature, BLOCK)
    index = tl.arange(0, BLOCK)
    if GREEDY:
        inside = tl.min(tl.where(x == block_peak, index, BLOCK - 1), axis=0)
    else:
        mass = _mass(x, block_peak).to(tl.float64)
        # What is left of the target within the block, rescaled to masses relative to the block's own peak.
        rest = (target - before) * tl.exp((peak - block_peak).to(tl.float64))
        inside = _first_above(tl.cumsum(mass, axis=0), mass, rest, index)
    chosen = tl.sum(tl.where(index == inside, x, 0.0), axis=0)
    token = tl.minimum(block * BLOCK + inside, vocabulary - 1)
    logprob = (chosen - peak).to(tl.float64) - tl.log(total)

    tl.store(tokens + row * tokens_row + own, token)
    tl.store(logprobs + row * logprobs_row + own, logprob.to(tl.float32))
    tl.store(own_lengths + row, own + 1)
    stop_index = tl.arange(0, STOPS)
    stop = tl.load(stop_ids + stop_index, mask=stop_index < stops, other=-1)
    is_stop = tl.max((stop == token).to(tl.int32), axis=0)
    is_full = own >= tl.load(limits + row)
    tl.store(finished + row, tl.where(is_stop != 0, 1, tl.where(is_full, 2, 0)))


@triton.jit
def _scaled(logits, block, vocabulary, temperature, BLOCK: tl.constexpr):
    """Load one block of logits over the temperature, with -inf beyond the vocabulary."""
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, temperature)  # rounded as PyTorch's division; the default division is approximate


@triton.jit
def _mass(x, peak):
    """Return exp(x - peak), which is 0 for a block of nothing but -inf."""
    return tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def _first_above(cumulative, mass, target, index):
    """Return the first place with mass whose cumulative sum exceeds the target.

    If rounding leaves none, return the last place with mass, so that no token of probability 0 is ever drawn.
    """
    far: tl.constexpr = 2**30
    first = tl.min(tl.where((cumulative > target) & (mass > 0), index, far), axis=0)
    last = tl.max(tl.where(mass > 0, index, 0), axis=0)
    return tl.where(first < far, first, last)


@triton.jit
def _uniform(key, own):
    """Compute `dapo.kernels.sampler.uniforms` for the position `own` - 1, in unsigned integers.

    `own` counts the last prompt token, so position 0 is the first drawn token.
    """
    x = key.to(tl.uint64, bitcast=True) + own.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return ((x >> 12).to(tl.float64) + 0.5) * 2.0**-52
