"""The memory budget of an update: as many tokens per micro-batch as memory allows. It affects only the speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo.config import OptimConfig
from dapo.model.forward import free_memory, head_weight
from dapo.model.memory import ENOUGH_TOKENS, HEAD_BYTES, MAX_TOKENS, activation_bytes
from dapo.model.trunk import FusedTrunk, Trunk

_CPU_TOKENS = 4096
_TOO_FEW_TOKENS = 1 << 11  # if fewer than this fit, the update takes the memory of the sampler's cache
_USABLE = 0.8  # fraction of the free memory; the rest is for what is not counted here


@dataclass(frozen=True, slots=True)
class Budget:
    """How an update is split: the tokens of a micro-batch, and how memory is found for them."""

    max_tokens: int
    recompute: bool = False
    needs_engine_memory: bool = False  # whether the sampler's cache must be freed during the update
    room: float = 0.0  # bytes for activations on a rank's GPU

    def tokens_that_fit(self, tokens: int, used: int) -> int:
        """Return how many tokens fit, given that `tokens` took `used` bytes more than a minimal micro-batch.

        A minimal micro-batch does not fill a chunk of logits, so `used` contains one, which does not scale with tokens.
        """
        per_token = (used - HEAD_BYTES) / tokens
        return min(self.max_tokens, _clamp(int(self.room / per_token))) if per_token > 0 else self.max_tokens

    @classmethod
    def of(cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, pending_bytes: int, cache_bytes: int = 0) -> Budget:
        """Return the budget of one process.

        `pending_bytes`: what the update will allocate besides activations. `cache_bytes` can be freed if necessary.
        """
        given = config.max_tokens_per_micro_batch
        can_recompute = isinstance(trunk, FusedTrunk)
        always = config.recompute_activations == "always" and can_recompute
        device = head_weight(causal_lm).device
        if device.type != "cuda":
            return cls(given or _CPU_TOKENS, always)
        may_recompute = can_recompute and config.recompute_activations != "never"
        least = _activation_bytes(causal_lm, trunk, recompute=may_recompute)  # per token
        free = _USABLE * free_memory(device) - pending_bytes - HEAD_BYTES
        needs_engine_memory = cache_bytes > 0 and free < (given or _TOO_FEW_TOKENS) * least
        free = max(0.0, free + _USABLE * cache_bytes * needs_engine_memory)
        keep = int(free / _activation_bytes(causal_lm, trunk, recompute=False))  # tokens whose activations fit
        recompute = always or (may_recompute and (given > keep if given else keep < ENOUGH_TOKENS))
        return cls(given or _clamp(int(free / least) if recompute else keep), recompute, needs_engine_memory)

    @classmethod
    def shared(
        cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, like: Tensor, pending_bytes: int, cache_bytes: int = 0,
        *, recompute: bool,
    ) -> Budget:  # fmt: skip
        """Return the budget of one rank. Whether layers recompute activations was decided when they were sharded.

        `like` has the device and the dtype to compute in.
        """
        given = config.max_tokens_per_micro_batch
        if not like.is_cuda:
            return cls(given or _CPU_TOKENS, recompute)
        per_token = _activation_bytes(causal_lm, trunk, recompute=recompute, dtype=like.dtype)
        free = _USABLE * free_memory(like.device) - pending_bytes - HEAD_BYTES
        needs_engine_memory = cache_bytes > 0 and free < (given or _TOO_FEW_TOKENS) * per_token
        free = max(0.0, free + _USABLE * cache_bytes * needs_engine_memory)
        return cls(given or _clamp(int(free / per_token)), recompute, needs_engine_memory, free)


def _clamp(tokens: int) -> int:
    return max(1, min(MAX_TOKENS, tokens))


def _activation_bytes(causal_lm: Any, trunk: Trunk, *, recompute: bool, dtype: torch.dtype | None = None) -> int:
    width = (dtype or head_weight(causal_lm).dtype).itemsize
    config, is_fused = causal_lm.config.get_text_config(), isinstance(trunk, FusedTrunk)
    return activation_bytes(config, width, recompute=recompute, is_fused=is_fused)
