"""The bytes that things take, each formula once: training state, keys and values, activations, logits."""

from __future__ import annotations

from typing import Any

from dapo.model.meter import head_size, inner_width, key_heads

GIB = 2**30
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # per trained parameter, in float32; there are two moments
HEAD_BYTES = 4 * GIB  # at most: the logits of a chunk, and their gradient
MAX_TOKENS = 1 << 17  # of a micro-batch
ENOUGH_TOKENS = 1 << 14  # fewer do not keep a large GPU busy: then activations are recomputed


def kv_bytes(config: Any, width: int) -> int:
    """Return the bytes of one token's keys and values, at `width` bytes per number."""
    return 2 * config.num_hidden_layers * key_heads(config) * head_size(config) * width


def checkpoint_bytes(parameters: int, trained: int, width: int) -> int:
    """Return the bytes of a checkpoint: weights at `width` bytes each, moments, and master copies of narrow weights."""
    masters = 0 if width == 4 else MASTER_BYTES
    return parameters * width + trained * (MOMENT_BYTES + masters)


def activation_bytes(config: Any, width: int, *, recompute: bool, is_fused: bool = True) -> int:
    """Estimate the bytes held per packed token between forward and backward, by counting what each layer saves.

    `width`: bytes per number. `is_fused`: whether the fused trunk runs the model, not autograd.
    """
    hidden, inner = config.hidden_size, inner_width(config)
    keys, queries = (heads * head_size(config) for heads in (key_heads(config), config.num_attention_heads))
    # Two float32 sums of the residual stream; then two norms, queries, keys and values (which may be copied for each
    # response), the attention output, gate and up.
    saved = 8 * hidden + width * (2 * hidden + 2 * queries + 6 * keys + 2 * inner)
    passing = width * (6 * inner + 2 * queries + 8 * hidden)  # temporary, of the layer that is running
    if not is_fused:  # autograd keeps every intermediate result
        saved *= 3
    layers = config.num_hidden_layers
    return layers * (4 + width) * hidden + saved + passing if recompute else layers * saved + passing
