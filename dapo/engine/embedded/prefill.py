"""Prefill: compute packed prompts into the paged cache, small packs as a CUDA graph.

For a small pack the GPU is faster than the host can launch kernels. A graph takes one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.engine.embedded.pages import PageStore, StoringAttention
from dapo.engine.embedded.sequence import SharedPrompt
from dapo.kernels.piece_attention import PAGE
from dapo.model.attention import Family
from dapo.model.forward import hidden_states, packed_plan
from dapo.model.graphs import GraphPool
from dapo.model.memory import PREFILL_GRAPH_TOKENS, PREFILL_TOKENS
from dapo.model.trunk import FusedTrunk, trunk_of
from dapo.model.varlen import FixedSegments, FixedSize, Layout, VarlenAttention

# Tokens that a graph is captured for; a pack is padded to the next size.
_SIZES = (256, 512, 1024, 2048, PREFILL_GRAPH_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    segments: FixedSegments
    inputs: tuple[Tensor, ...]  # tokens, positions, pages


class Prefill:
    """Computes all but the last token of each prompt. The last one is the first decode step of each response."""

    max_tokens = PREFILL_TOKENS  # in one forward pass

    def __init__(self, causal_lm: Any, store: PageStore) -> None:
        self.model = causal_lm
        self.store = store
        self.device = store.storage.device
        self.captured: dict[FixedSize, _Captured] = {}
        self.pool = GraphPool()
        self.can_capture = self.device.type == "cuda" and isinstance(trunk_of(causal_lm), FusedTrunk)

    def __call__(self, prompts: Sequence[SharedPrompt]) -> None:
        """Compute keys and values of the prompts into their pages, `prompt.cached`."""
        batch: list[SharedPrompt] = []
        for prompt in prompts:
            if batch and sum(p.length for p in batch) + prompt.length > self.max_tokens:
                self._compute(batch)
                batch = []
            if prompt.length > 1:
                batch.append(prompt)
        if batch:
            self._compute(batch)

    def release(self) -> None:
        """Drop the graphs, which hold the address of the cache."""
        self.captured.clear()
        self.pool = GraphPool()

    def _compute(self, prompts: list[SharedPrompt]) -> None:
        lengths = [prompt.length - 1 for prompt in prompts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        families = [Family((start, length)) for start, length in zip(starts, lengths, strict=True)]
        inputs = (
            np.concatenate([np.array(prompt.tokens[:-1]) for prompt in prompts]),
            np.concatenate([np.arange(length) for length in lengths]),
            np.concatenate([np.repeat(p.cached, PAGE)[: p.length - 1] for p in prompts]),  # the page of each token
        )
        layout = Layout.of(families)
        tokens = next((size for size in _SIZES if self.max_tokens >= size >= layout.tokens), None)
        if self.can_capture and tokens is not None:
            self._replay(FixedSize.of(layout, tokens), layout, inputs)
        else:
            tokens_T, positions_T, pages_T = (torch.from_numpy(part).to(self.device, torch.long) for part in inputs)
            plan = packed_plan(self.model, families, positions_T)
            self._run(tokens_T, positions_T, StoringAttention(plan, self.store, pages_T, positions_T % PAGE))

    def _run(self, tokens_T: Tensor, positions_T: Tensor, plan: StoringAttention) -> None:
        hidden_states(self.model, tokens_T, positions_T, plan)  # for what the plan stores; the result is not needed

    def _replay(self, size: FixedSize, layout: Layout, inputs: Sequence[np.ndarray]) -> None:
        if size not in self.captured:
            self.captured[size] = self._capture(size)
        captured = self.captured[size]
        captured.segments.fill(layout)
        for held, values in zip(captured.inputs, inputs, strict=True):
            padded = np.zeros(size.tokens, np.int64)  # padding writes to page 0, which no sequence uses
            padded[: len(values)] = values
            held.copy_(torch.from_numpy(padded))
        captured.graph.replay()

    def _capture(self, size: FixedSize) -> _Captured:
        tokens_T, positions_T, pages_T = (
            torch.zeros(size.tokens, dtype=torch.long, device=self.device) for _ in range(3)
        )
        segments = FixedSegments(size, self.device)
        plan = VarlenAttention(segments)
        graph, _ = self.pool.capture(
            lambda: self._run(tokens_T, positions_T, StoringAttention(plan, self.store, pages_T, positions_T % PAGE))
        )
        return _Captured(graph, segments, (tokens_T, positions_T, pages_T))
