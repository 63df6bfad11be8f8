"""One decode step on the device, from embedding to drawn token, replayed as a CUDA graph.

All state of a response lives on the device in its *row*: tokens, log-probabilities, lengths, pages, and whether it has
finished. A step reads and advances the rows named in `rows_B` without any help from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.engine.embedded.pages import PagedAttention, PageStore, longest_pages
from dapo.engine.embedded.sequence import Response
from dapo.kernels.decode_attention import PagedState
from dapo.kernels.draw import DrawState, draw_and_advance
from dapo.model.forward import head_weight, hidden_states
from dapo.model.graphs import GraphPool
from dapo.model.products import wide_product
from dapo.types import SamplingParams

PADDING_ROW = 0  # marked as finished, so that the unused positions of a batch draw nothing
_ROWS_SORTED_AT_ONCE = 128  # top-p and top-k sort the logits; sorting a whole batch would take gigabytes


class DecodeStep:
    """The rows on the device, and the step that draws one token for each position of the batch.

    A row's own tokens start with the last token of its prompt. Only the earlier prompt tokens are prefilled, so the
    first token of a response is drawn by an ordinary step.
    """

    def __init__(
        self, causal_lm: Any, store: PageStore, stop_ids: frozenset[int], max_concurrent: int, max_length: int
    ) -> None:
        self.model = causal_lm
        self.store = store
        self.max_concurrent = max_concurrent
        self.weight = weight = head_weight(causal_lm)
        rows, integers = max_concurrent + 1, {"dtype": torch.int32, "device": weight.device}
        self.rows_B = torch.zeros(max_concurrent, **integers)  # the row of each position of the batch
        self.table = torch.zeros(rows, longest_pages(max_length), **integers)
        self.prompt_lengths = torch.zeros(rows, **integers)  # prompt tokens in the cache
        self.draw_state = DrawState(
            keys=torch.zeros(rows, dtype=torch.int64, device=weight.device),
            own_lengths=torch.ones(rows, **integers),
            limits=torch.ones(rows, **integers),
            tokens=torch.zeros(rows, max_length + 1, **integers),
            logprobs=torch.zeros(rows, max_length + 1, dtype=torch.float32, device=weight.device),
            finished=torch.ones(rows, **integers),  # the padding row stays finished
            stop_ids=torch.tensor(sorted(stop_ids), **integers),
        )
        self.can_capture = _can_capture(causal_lm)
        # Per batch size and sampling parameters: the graph, and the logits to draw from if it does not draw itself.
        self.graphs: dict[tuple[int, SamplingParams | None], tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self.shared_logits: Tensor | None = None
        self.pool = GraphPool()

    def write_rows(self, indices: Sequence[int], responses: Sequence[Response]) -> None:
        """Write the initial state of responses to their rows: nothing drawn yet, or the tokens of earlier turns."""
        rows, state = torch.tensor(indices, device=self.weight.device), self.draw_state
        owns = [1 + response.fixed for response in responses]  # with the last prompt token
        columns: tuple[tuple[Tensor, list[int]], ...] = (
            (self.prompt_lengths, [response.prompt.length - 1 for response in responses]),
            (state.own_lengths, owns),
            (state.limits, [response.limit for response in responses]),
            (state.finished, [0] * len(responses)),
            (state.keys, [response.key for response in responses]),
        )
        for column, values in columns:
            column[rows] = torch.tensor(values, dtype=column.dtype, device=rows.device)
        tokens, logprobs = (np.zeros((len(responses), max(owns)), dtype) for dtype in (np.int32, np.float32))
        for i, (response, own) in enumerate(zip(responses, owns, strict=True)):
            tokens[i, 0] = response.prompt.tokens[-1]
            tokens[i, 1:own], logprobs[i, 1:own] = response.tokens, response.logprobs
        state.tokens[rows, : max(owns)] = torch.from_numpy(tokens).to(rows.device)
        state.logprobs[rows, : max(owns)] = torch.from_numpy(logprobs).to(rows.device)

    def prepare(self, bucket: int, params: SamplingParams) -> None:
        """Capture the graph for a batch of `bucket` positions, unless it exists. Overwrites `rows_B`."""
        if self.can_capture:
            self._graph(bucket, params)

    @torch.no_grad()
    def run(self, bucket: int, params: SamplingParams) -> None:
        """Draw the next token of the first `bucket` positions of the batch."""
        if not self.can_capture:
            self._step(bucket, params)
            return
        graph, logits_BV = self._graph(bucket, params)
        graph.replay()
        if logits_BV is not None:
            self._draw(logits_BV, params)

    def release(self) -> None:
        """Drop the graphs, which hold the address of the cache. They are captured again when needed."""
        self.graphs.clear()
        self.pool = GraphPool()

    def _graph(self, bucket: int, params: SamplingParams) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """Return the graph of one step, captured when a batch size is first needed.

        With truncation (top-p, top-k) the graph ends at the logits, and drawing follows outside of it. Sorting inside
        the graph would hold its memory for as long as the graph lives.
        """
        key = bucket, None if _is_truncated(params) else params
        if key not in self.graphs:
            self.rows_B.fill_(PADDING_ROW)  # capturing runs the step, and padding rows draw nothing
            run = self._write_shared_logits if _is_truncated(params) else self._step
            self.graphs[key] = self.pool.capture(lambda: run(bucket, params))
        return self.graphs[key]

    @torch.no_grad()
    def _step(self, bucket: int, params: SamplingParams) -> None:
        self._draw(self._logits(bucket), params)

    def _write_shared_logits(self, bucket: int, params: SamplingParams) -> Tensor:
        """Compute logits into one buffer that the graphs of all batch sizes share."""
        if self.shared_logits is None:
            shape = self.max_concurrent, len(self.weight)
            self.shared_logits = torch.empty(shape, dtype=torch.float32, device=self.weight.device)
        return self.shared_logits[:bucket].copy_(self._logits(bucket))

    def _logits(self, bucket: int) -> Tensor:
        state, rows_B = self.draw_state, self.rows_B[:bucket]
        index = rows_B.long()
        own_B = state.own_lengths[index].long()
        tokens_B = state.tokens[index, own_B - 1].long()  # the newest token, which is not in the cache yet
        positions_B = self.prompt_lengths[index] + own_B - 1
        paged = PagedState(rows_B, self.table, self.prompt_lengths, state.own_lengths)
        hidden_B = hidden_states(self.model, tokens_B, positions_B, PagedAttention(self.store, paged))
        return wide_product(hidden_B, self.weight.t())

    def _draw(self, logits_BV: Tensor, params: SamplingParams) -> None:
        bucket = len(logits_BV)
        size = _ROWS_SORTED_AT_ONCE if _is_truncated(params) else bucket
        for start in range(0, bucket, size):
            rows = slice(start, start + size)
            draw_and_advance(logits_BV[rows], self.rows_B[:bucket][rows], self.draw_state, params)


class RowStatus:
    """The host's copy of each row's length and finish state, fetched from the device after a burst."""

    def __init__(self, rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.own, self.done = (torch.zeros(rows, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2))
        self.own_lengths, self.finished = self.own.numpy(), self.done.numpy()  # views of the same memory
        self.event = torch.cuda.Event() if is_cuda else None

    def start_copy(self, state: DrawState) -> None:
        """Queue the copy behind the steps that were launched."""
        self.own.copy_(state.own_lengths, non_blocking=True)
        self.done.copy_(state.finished, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


def _is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)


def _can_capture(causal_lm: Any) -> bool:
    """Return whether a step can be a graph: on CUDA, and with rotary angles that do not depend on the positions seen.

    For the rotary types "dynamic" and "longrope", transformers reads the positions on the host in every step.
    """
    kinds = [getattr(module, "rope_type", None) for module in causal_lm.modules()]
    named = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    return head_weight(causal_lm).is_cuda and not named & {"dynamic", "longrope"}
