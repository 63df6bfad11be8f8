"""How much arithmetic an update is, and how much a device could do: the two halves of MFU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

# Dense tensor-core rates of 16-bit floats with float32 sums, as the data sheets give them without sparsity. The first
# pattern that is found in the device's name counts, so the slower variants of a name come before it.
_PEAKS = (
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH[12]00\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX 4090(?! D\b)", 165e12),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Operations per second of matrix products on this device; None where they are not known."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((rate for pattern, rate in _PEAKS if re.search(pattern, device_name)), None)


def matmul_parameters(config: Any) -> int:
    """Weights that every token is multiplied with in a Llama-like model, the lm-head included, the embedding not."""
    return _trunk_parameters(config) + _head_parameters(config)


def training_flops(
    config: Any,
    tokens: int,
    sequence_lengths: Iterable[int],
    *,
    head_tokens: int | None = None,
    spared_prompts: Iterable[int] = (),
) -> float:
    """Forward and backward of `tokens` packed inputs, without what is computed twice to save memory.

    Each weight takes part in one product forward and two backward. Attention is causal, so a token is paired with
    itself and those before it, in its own sequence. `head_tokens`: those that reach the lm-head, where not all do.
    `spared_prompts`: the lengths of the prompts that sequences in `sequence_lengths` did not compute themselves,
    because another one of their group did: a group of n has n - 1 of them.
    """
    weights = _trunk_parameters(config) * tokens
    weights += _head_parameters(config) * (tokens if head_tokens is None else head_tokens)
    pairs = sum(map(_causal_pairs, sequence_lengths)) - sum(map(_causal_pairs, spared_prompts))
    # Scores and weighted sum, for each layer and query head.
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head_size(config) * pairs
    return 6.0 * (weights + attention)


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def _trunk_parameters(config: Any) -> int:
    heads = config.num_attention_heads
    attention = 2 * config.hidden_size * head_size(config) * (heads + key_heads(config))
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * inner_width(config))


def inner_width(config: Any) -> int:
    """Of the feed-forward layers, under the names that models have for it."""
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return next((width for name in names if (width := getattr(config, name, None))), 4 * config.hidden_size)


def _head_parameters(config: Any) -> int:
    return config.vocab_size * config.hidden_size


def kv_bytes(config: Any, width: int) -> int:
    """Of the keys and values of one token, at `width` bytes a number."""
    return 2 * config.num_hidden_layers * key_heads(config) * head_size(config) * width


def key_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
