"""A decoder for GPUs whose cache is as large as the free memory allows."""

from __future__ import annotations

from typing import Any

from dapo.engine.embedded.paged import PagedDecoder, cache_shape
from dapo.engine.embedded.pages import PageStore, longest_pages
from dapo.errors import ModelError
from dapo.kernels.piece_attention import PAGE
from dapo.model.forward import free_memory, head_weight
from dapo.model.memory import cache_room, sampling_bytes

MAX_CONCURRENT = 1024


def sized_decoder(
    causal_lm: Any, stop_ids: frozenset[int], max_concurrent: int, max_length: int, fraction: float, reserved: int
) -> PagedDecoder:
    """Build a decoder whose cache holds `max_concurrent` of the longest sequences, or as many as memory allows.

    The cache takes at most `fraction` of the free memory after `reserved` bytes, and leaves room to compute.
    """
    weight = head_weight(causal_lm)
    layers, _, kv_heads, head_dim = cache_shape(causal_lm, 0)
    longest = longest_pages(max_length)
    max_concurrent = max_concurrent or MAX_CONCURRENT
    left = max(0, free_memory(weight.device) - reserved)
    config, width = causal_lm.config.get_text_config(), weight.dtype.itemsize
    room, prompts = cache_room(config, width, left, fraction, max_concurrent, max_length)
    # One page more than the sequences need: page 0 belongs to padding.
    page = PageStore.page_bytes(layers, kv_heads, head_dim, weight.dtype)
    pages = min(1 + max_concurrent * longest, room // page)
    if pages < 1 + longest:
        raise ModelError(
            f"the key/value cache would hold {max(0, pages - 1) * PAGE} tokens, fewer than one sequence of "
            f"{max_length}; raise rollout.kv_memory_fraction, or lower data.max_response_length"
        )
    decoder = PagedDecoder(causal_lm, stop_ids, max_concurrent, max_length, pages)
    decoder.prefill.max_tokens = prompts
    decoder.working_bytes = sampling_bytes(config, width, max_concurrent, prompts)
    return decoder
