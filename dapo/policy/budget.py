"""How many tokens an update computes at once: as many as memory allows, since it changes nothing but the speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo.config import OptimConfig
from dapo.model.forward import free_memory, head_weight
from dapo.model.meter import head_size, inner_width, key_heads
from dapo.model.trunk import FusedTrunk, Trunk

_CPU_TOKENS = 4096
_MOST_TOKENS = 1 << 17
_ENOUGH_TOKENS = 1 << 14  # with fewer at once a large GPU is not kept busy: then activations are computed twice
_TOO_FEW_TOKENS = 1 << 11  # with fewer still the sampler's cache makes room during the update
_SHARE = 0.8  # of the free memory; the rest is for what is not counted here
_HEAD_BYTES = 4 << 30  # logits of a chunk, and their gradient


@dataclass(frozen=True, slots=True)
class Budget:
    max_tokens: int
    recompute: bool = False
    needs_cache: bool = False  # only with the memory of the sampler's cache
    room: float = 0.0  # bytes of a rank's GPU for activations

    def measured(self, tokens: int, used: int) -> int:
        """How many tokens at once there is room for, after so many have `used` bytes more than next to none.

        Logits are computed in chunks, and those of few tokens are no full chunk: so they do not count.
        """
        per_token = (used - _HEAD_BYTES) / tokens
        return min(self.max_tokens, _within(int(self.room / per_token))) if per_token > 0 else self.max_tokens

    @classmethod
    def of(cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, to_come: int, cache_bytes: int = 0) -> Budget:
        """`to_come`: bytes that the update will need beside the activations; `cache_bytes` can be had if need be."""
        given = config.max_tokens_per_micro_batch
        can_recompute = isinstance(trunk, FusedTrunk)
        always = config.recompute_activations == "always" and can_recompute
        device = head_weight(causal_lm).device
        if device.type != "cuda":
            return cls(given or _CPU_TOKENS, always)
        may_recompute = can_recompute and config.recompute_activations != "never"
        least = activation_bytes(causal_lm, trunk, recompute=may_recompute)
        free = _SHARE * free_memory(device) - to_come - _HEAD_BYTES
        needs_cache = cache_bytes > 0 and free < (given or _TOO_FEW_TOKENS) * least
        free = max(0.0, free + _SHARE * cache_bytes * needs_cache)
        keep = int(free / activation_bytes(causal_lm, trunk, recompute=False))
        recompute = always or (may_recompute and (given > keep if given else keep < _ENOUGH_TOKENS))
        return cls(given or _within(int(free / least) if recompute else keep), recompute, needs_cache)

    @classmethod
    def shared(
        cls, causal_lm: Any, trunk: Trunk, config: OptimConfig, like: Tensor, to_come: int, cache_bytes: int = 0,
        *, recompute: bool,
    ) -> Budget:  # fmt: skip
        """Of one rank of several, whose layers keep or recompute their activations since they were cut into shards.

        `like` has the device and the precision of what is computed.
        """
        given = config.max_tokens_per_micro_batch
        if not like.is_cuda:
            return cls(given or _CPU_TOKENS, recompute)
        per_token = activation_bytes(causal_lm, trunk, recompute=recompute, dtype=like.dtype)
        free = _SHARE * free_memory(like.device) - to_come - _HEAD_BYTES
        needs_cache = cache_bytes > 0 and free < (given or _TOO_FEW_TOKENS) * per_token
        free = max(0.0, free + _SHARE * cache_bytes * needs_cache)
        return cls(given or _within(int(free / per_token)), recompute, needs_cache, free)


def _within(tokens: int) -> int:
    return max(1, min(_MOST_TOKENS, tokens))


def activation_bytes(causal_lm: Any, trunk: Trunk, *, recompute: bool, dtype: torch.dtype | None = None) -> int:
    """Held per packed token between forward and backward: an estimate by counting what each layer saves."""
    config = causal_lm.config.get_text_config()
    width, inner = config.hidden_size, inner_width(config)
    kv_width, query_width = (heads * head_size(config) for heads in (key_heads(config), config.num_attention_heads))
    size = torch.finfo(dtype or head_weight(causal_lm).dtype).bits // 8
    # Both sums of the residual stream in float32; both norms, queries, keys and values (which may be copied for each
    # response), attention's result, gate and up.
    saved = 8 * width + size * (2 * width + 2 * query_width + 6 * kv_width + 2 * inner)
    passing = size * (6 * inner + 2 * query_width + 8 * width)  # of the layer at work
    if not isinstance(trunk, FusedTrunk):  # autograd keeps every intermediate result
        saved *= 3
    layers = config.num_hidden_layers
    return layers * (4 + size) * width + saved + passing if recompute else layers * saved + passing
