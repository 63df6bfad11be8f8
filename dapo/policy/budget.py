"""The memory budget of an update: as many tokens per micro-batch as memory allows. It affects only the speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo.config import OptimConfig
from dapo.model.forward import free_memory, head_weight
from dapo.model.memory import HEAD_BYTES, MAX_TOKENS, Division, activation_bytes, divide, micro_batch
from dapo.model.trunk import FusedTrunk, Trunk

_CPU_TOKENS = 4096
_TOO_FEW_TOKENS = 1 << 11  # if fewer than this fit, the update takes the memory of the sampler's cache


@dataclass(frozen=True, slots=True)
class Budget:
    """How an update is split: the tokens of a micro-batch, and how memory is found for them."""

    max_tokens: int
    recompute: bool = False
    needs_engine_memory: bool = False  # whether the sampler's cache must be freed during the update
    room: float = 0.0  # bytes for activations on a rank's GPU
    head_bytes: int = HEAD_BYTES  # for the logits of a chunk, and their gradient
    graph_tokens: int = 0  # of the largest micro-batch that may be a CUDA graph, which keeps its memory

    def tokens_that_fit(self, tokens: int, used: int) -> int:
        """Return how many tokens fit, given that `tokens` took `used` bytes more than a minimal micro-batch.

        A minimal micro-batch does not fill a chunk of logits, so `used` contains one, which does not scale with tokens.
        """
        per_token = (used - HEAD_BYTES) / tokens
        return min(self.max_tokens, _clamp(int(self.room / per_token))) if per_token > 0 else self.max_tokens

    @classmethod
    def of(
        cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, pending_bytes: int, cache_bytes: int = 0,
        *, lends: bool = False, graph_tokens: int = 0, most: int = MAX_TOKENS, longest: int = 0,
    ) -> Budget:  # fmt: skip
        """Return the budget of one process.

        `pending_bytes`: what the update will allocate besides activations. `cache_bytes` can be freed if necessary;
        `lends` says that it will be. Graphs of up to `graph_tokens` get at most a quarter of the memory. `most`: tokens
        of the largest update. `longest`: tokens of the longest sequence, which is never split.
        """
        given = config.max_tokens_per_micro_batch
        can_recompute = isinstance(trunk, FusedTrunk)
        always = config.recompute_activations == "always" and can_recompute
        device = head_weight(causal_lm).device
        if device.type != "cuda":
            return cls(given or _CPU_TOKENS, always, graph_tokens=graph_tokens)
        may_recompute = can_recompute and config.recompute_activations != "never"
        kept, recomputed = (_activation_bytes(causal_lm, trunk, recompute=each) for each in (False, can_recompute))
        room = free_memory(device) - pending_bytes
        least = max(longest, given or _TOO_FEW_TOKENS) * (recomputed if may_recompute else kept)
        needs_engine_memory = cache_bytes > 0 and (lends or room - HEAD_BYTES < least)
        room += cache_bytes * needs_engine_memory
        split = partial(
            micro_batch, kept=kept, recomputed=recomputed, given=given, may_recompute=may_recompute, always=always,
            most=most, longest=longest,
        )  # fmt: skip
        found = split(room)
        graphs = 0 if found.recompute else max(0, min(graph_tokens, int((room / 4 - found.head_bytes) / kept)))
        beside = split(room - found.head_bytes - graphs * kept)
        if beside.recompute:  # graphs are not worth that
            graphs = 0
        elif graphs:
            found = beside
        return cls(
            max(1, found.tokens), found.recompute, needs_engine_memory, head_bytes=found.head_bytes, graph_tokens=graphs
        )

    @classmethod
    def shared(
        cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, like: Tensor, pending_bytes: int, cache_bytes: int = 0,
        *, recompute: bool, longest: int = 0,
    ) -> Budget:  # fmt: skip
        """Return the budget of one rank. Whether layers recompute activations was decided when they were sharded.

        `like` has the device and the dtype to compute in.
        """
        given = config.max_tokens_per_micro_batch
        if not like.is_cuda:
            return cls(given or _CPU_TOKENS, recompute)
        per_token = _activation_bytes(causal_lm, trunk, recompute=recompute, dtype=like.dtype)
        free = free_memory(like.device) - pending_bytes - HEAD_BYTES
        needs_engine_memory = cache_bytes > 0 and free < max(longest, given or _TOO_FEW_TOKENS) * per_token
        free = max(0, free + cache_bytes * needs_engine_memory)
        return cls(given or _clamp(int(free / per_token)), recompute, needs_engine_memory, free)


def division(
    causal_lm: Any, trunk: Trunk, gradient_bytes: int, moment_bytes: int, *, may_lend: bool, longest: int
) -> Division:
    """Return how one process divides the memory of its GPU, once weights and masters are on it."""
    device = head_weight(causal_lm).device
    if device.type != "cuda":
        return Division()
    per_token = _activation_bytes(causal_lm, trunk, recompute=isinstance(trunk, FusedTrunk))
    free = free_memory(device)
    return divide(free, gradient_bytes, moment_bytes, per_token, may_lend=may_lend, longest=longest)


def _clamp(tokens: int) -> int:
    return max(1, min(MAX_TOKENS, tokens))


def _activation_bytes(causal_lm: Any, trunk: Trunk, *, recompute: bool, dtype: torch.dtype | None = None) -> int:
    width = (dtype or head_weight(causal_lm).dtype).itemsize
    config, is_fused = causal_lm.config.get_text_config(), isinstance(trunk, FusedTrunk)
    return activation_bytes(config, width, recompute=recompute, is_fused=is_fused)
