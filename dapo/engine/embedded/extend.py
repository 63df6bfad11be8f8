"""Computes the tokens that were given to episodes into the paged cache.

Each token attends by the kernel of the decode step, as if it were a response of its own that is so long. So its keys
and values have the bits that a decode step would have computed, and one forward pass computes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dapo.engine.embedded.pages import ExtendingAttention, PageStore
from dapo.kernels.decode_attention import PagedState
from dapo.model.forward import hidden_states
from dapo.model.graphs import GraphPool
from dapo.model.trunk import FusedTrunk, trunk_of

_MAX_TOKENS = 4096  # in one forward pass
_SIZES = (64, 256, 1024, _MAX_TOKENS)  # tokens that a graph is captured for; a pass is padded to the next size


class OwnSpan(NamedTuple):
    """Own tokens of one response that are not in its pages yet. The own tokens begin with the last prompt token."""

    tokens: Sequence[int]
    start: int  # number of own tokens before them
    prompt_length: int  # prompt tokens in the cache: all but the last
    pages: np.ndarray  # the response's row of the page table


class _Inputs(NamedTuple):
    tokens_T: Any
    prompt_lengths_T: Any
    own_lengths_T: Any  # with the token itself
    pages_TW: Any


class PagedExtension:
    """Computes keys and values of spans of own tokens."""

    def __init__(self, causal_lm: Any, store: PageStore) -> None:
        self.model = causal_lm
        self.store = store
        self.device = store.storage.device
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, _Inputs]] = {}
        self.pool = GraphPool()
        self.can_capture = self.device.type == "cuda" and isinstance(trunk_of(causal_lm), FusedTrunk)

    def __call__(self, spans: Sequence[OwnSpan]) -> None:
        sizes = [len(span.tokens) for span in spans]
        if not sum(sizes):
            return
        inputs = _Inputs(
            np.concatenate([np.asarray(span.tokens, np.int32) for span in spans]),
            np.repeat(np.array([span.prompt_length for span in spans], np.int32), sizes),
            np.concatenate([span.start + 1 + np.arange(len(span.tokens), dtype=np.int32) for span in spans]),
            np.repeat(np.stack([span.pages for span in spans]), sizes, axis=0),
        )
        # A later pass finds the keys of the passes before it in the cache.
        for start in range(0, sum(sizes), _MAX_TOKENS):
            self._compute(_Inputs(*(values[start : start + _MAX_TOKENS] for values in inputs)))

    def release(self) -> None:
        """Drop the graphs, which hold the address of the cache."""
        self.captured.clear()
        self.pool = GraphPool()

    def _compute(self, inputs: _Inputs) -> None:
        if not self.can_capture:
            self._run(_Inputs(*(torch.from_numpy(np.ascontiguousarray(v)).to(self.device) for v in inputs)))
            return
        size = next(size for size in _SIZES if size >= len(inputs.tokens_T))
        if size not in self.captured:
            self.captured[size] = self._capture(size, inputs.pages_TW.shape[1])
        graph, held = self.captured[size]
        for target, values in zip(held, inputs, strict=True):
            padded = (
                np.ones(target.shape, np.int32) if target is held.own_lengths_T else np.zeros(target.shape, np.int32)
            )
            padded[: len(values)] = values
            target.copy_(torch.from_numpy(padded))
        graph.replay()

    def _capture(self, size: int, width: int) -> tuple[torch.cuda.CUDAGraph, _Inputs]:
        """Capture on padding: tokens of responses without a prompt, which write to page 0."""
        tokens_T, prompts_T = (torch.zeros(size, dtype=torch.int32, device=self.device) for _ in range(2))
        pages_TW = torch.zeros(size, width, dtype=torch.int32, device=self.device)
        held = _Inputs(tokens_T, prompts_T, torch.ones_like(tokens_T), pages_TW)
        graph, _ = self.pool.capture(lambda: self._run(held))
        return graph, held

    @torch.no_grad()
    def _run(self, inputs: _Inputs) -> None:
        tokens_T, prompts_T, owns_T, pages_TW = inputs
        places_T = torch.arange(len(tokens_T), dtype=torch.int32, device=self.device)
        plan = ExtendingAttention(self.store, PagedState(places_T, pages_TW, prompts_T, owns_T))
        hidden_states(self.model, tokens_T.long(), (prompts_T + owns_T - 1).long(), plan)  # for what the plan stores
