"""The end of a decode step on the device: draw each response's next token, write it down, see whether it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.sampler import draw, uniforms
from dapo.types import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class DrawState:
    """What is drawn so far, by row. The own tokens of a row begin with the last one of its prompt."""

    keys: Tensor  # int64 [rows]: the identity of the row's random numbers
    own_lengths: Tensor  # int32 [rows]
    limits: Tensor  # int32 [rows]: most tokens to draw
    tokens: Tensor  # int32 [rows, capacity]: the own tokens
    logprobs: Tensor  # float32 [rows, capacity]: of the own tokens
    finished: Tensor  # int32 [rows]: 0 while running, 1 by a stop token, 2 by length
    stop_ids: Tensor  # int32 [any number]


def draw_and_advance(logits_BV: Tensor, rows_B: Tensor, state: DrawState, params: SamplingParams) -> None:
    """Append one token to each row of `rows_B` that is running; the others, which may repeat, stay as they are."""
    truncated = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
    if logits_BV.is_cuda and not truncated:
        draw_and_advance_triton(logits_BV, rows_B, state, params.temperature)
    else:
        draw_and_advance_torch(logits_BV, rows_B, state, params)


def draw_and_advance_triton(logits_BV: Tensor, rows_B: Tensor, state: DrawState, temperature: float) -> None:
    """Without truncation, so that the logits are read about once."""
    from dapo.kernels import _draw_triton  # Triton is not installed everywhere

    _draw_triton.launch(logits_BV, rows_B, state, temperature)


def draw_and_advance_torch(logits_BV: Tensor, rows_B: Tensor, state: DrawState, params: SamplingParams) -> None:
    """With operations of fixed shape only, so that a CUDA graph can hold them."""
    rows_B = rows_B.long()
    own_B = state.own_lengths[rows_B]
    finished_B = state.finished[rows_B]
    is_running = finished_B == 0
    tokens_B, logprobs_B = draw(logits_BV, uniforms(state.keys[rows_B], own_B.long() - 1), params)

    # A finished row gets back what it has, so that its repetitions agree; it may also be full.
    place = rows_B, own_B.long().clamp(max=state.tokens.shape[1] - 1)
    state.tokens[place] = torch.where(is_running, tokens_B.int(), state.tokens[place])
    state.logprobs[place] = torch.where(is_running, logprobs_B, state.logprobs[place])
    state.own_lengths[rows_B] = own_B + is_running.int()
    is_stop = (tokens_B[:, None] == state.stop_ids).any(-1)
    outcome_B = torch.where(is_stop, 1, torch.where(own_B >= state.limits[rows_B], 2, 0)).int()
    state.finished[rows_B] = torch.where(is_running, outcome_B, finished_B)
