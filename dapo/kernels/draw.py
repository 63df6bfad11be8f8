"""The end of a decode step, on the device: draw each response's next token, append it, and check whether it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel_where
from dapo.kernels.sampler import draw, uniforms
from dapo.types import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class DrawState:
    """The responses so far, one per row. The own tokens of a row begin with the last token of its prompt."""

    keys: Tensor  # int64 [rows]: seed of the row's random numbers, from `sampler.row_key`
    own_lengths: Tensor  # int32 [rows]
    limits: Tensor  # int32 [rows]: greatest number of tokens to draw
    tokens: Tensor  # int32 [rows, capacity]: own tokens
    logprobs: Tensor  # float32 [rows, capacity]: of the own tokens
    finished: Tensor  # int32 [rows]: 0 while running, 1 by a stop token, 2 by length
    stop_ids: Tensor  # int32 [stop tokens]


def _is_untruncated_on_cuda(logits_BV: Tensor, rows_B: Tensor, state: DrawState, params: SamplingParams) -> bool:
    is_truncated = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
    return logits_BV.is_cuda and not is_truncated


@kernel_where(_is_untruncated_on_cuda)
def draw_and_advance(logits_BV: Tensor, rows_B: Tensor, state: DrawState, params: SamplingParams) -> None:
    """Append one token to each running row of `rows_B`. Finished rows, which may repeat, stay as they are.

    Only operations of fixed shape are used, so that a CUDA graph can hold them.
    """
    rows_B = rows_B.long()
    own_B = state.own_lengths[rows_B]
    finished_B = state.finished[rows_B]
    is_running = finished_B == 0
    tokens_B, logprobs_B = draw(logits_BV, uniforms(state.keys[rows_B], own_B.long() - 1), params)

    # A finished row is overwritten with its own content, so that its repetitions in the batch agree. It may be full, so
    # its index is clamped.
    place = rows_B, own_B.long().clamp(max=state.tokens.shape[1] - 1)
    state.tokens[place] = torch.where(is_running, tokens_B.int(), state.tokens[place])
    state.logprobs[place] = torch.where(is_running, logprobs_B, state.logprobs[place])
    state.own_lengths[rows_B] = own_B + is_running.int()
    is_stop = (tokens_B[:, None] == state.stop_ids).any(-1)
    outcome_B = torch.where(is_stop, 1, torch.where(own_B >= state.limits[rows_B], 2, 0)).int()
    state.finished[rows_B] = torch.where(is_running, outcome_B, finished_B)
