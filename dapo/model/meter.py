"""The two halves of MFU: the operations of an update, and the peak rate of a device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Dense tensor-core FLOP/s in 16 bits with float32 accumulation, without sparsity, from the data sheets. The first
# pattern that matches the device's name counts, so the slower variants of a name come first.
_PEAKS = (
    (r"\bH[18]00 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH[128]00\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\bB200\b", 2250e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA6000\b", 155e12),
    (r"\bA4000\b", 77e12),
    (r"\bA10\b", 125e12),
    (r"\bRTX ?5090(?! D\b)", 210e12),
    (r"\bRTX ?4090(?! D\b)", 165e12),
    (r"\bRTX ?4080(?! SUPER\b)", 97e12),
    (r"\bRTX ?3090(?! Ti\b)", 71e12),
    (r"\bRTX ?3060(?! Ti\b)", 25e12),
)


def peak_flops(device_name: str, width: int = 2) -> float | None:
    """Return the peak FLOP/s of products of numbers of `width` bytes on this device, or None if it is not known."""
    if width != 2:
        return None
    return next((rate for pattern, rate in _PEAKS if re.search(pattern, device_name, re.IGNORECASE)), None)


def matmul_parameters(config: Any) -> int:
    """Return the number of weights that multiply each token in a Llama-like model: lm-head included, embedding not."""
    return _trunk_parameters(config) + _head_parameters(config)


def training_flops(
    config: Any, tokens: int, pairs: int, *, head_tokens: int | None = None, frozen: bool = False
) -> float:
    """Return the operations of forward and backward over `tokens` packed inputs, without recomputation.

    Each weight takes part in one product forward and two backward, at two operations per token. `pairs` are those of a
    query and a key that it sees, in one head. `head_tokens` counts the tokens that reach the lm-head; by default all.
    `frozen` weights need no gradient: one product less. The few operations of LoRA adapters are not counted.
    """
    weights = _trunk_parameters(config) * tokens
    weights += _head_parameters(config) * (tokens if head_tokens is None else head_tokens)
    # Two products (scores, and the weighted sum of values) in each layer and query head.
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head_size(config) * pairs
    return (4.0 if frozen else 6.0) * weights + 6.0 * attention


def causal_pairs(lengths: Iterable[int]) -> int:
    """Return the pairs of sequences in which a token is paired with itself and the tokens before it."""
    return sum(length * (length + 1) // 2 for length in lengths)


def _trunk_parameters(config: Any) -> int:
    return config.num_hidden_layers * layer_parameters(config)


def layer_parameters(config: Any) -> int:
    """Return the weights of one layer: projections and gated feed-forward, without the few of norms and biases."""
    attention = 2 * config.hidden_size * head_size(config) * (config.num_attention_heads + key_heads(config))
    return attention + 3 * config.hidden_size * inner_width(config)


def inner_width(config: Any) -> int:
    """Return the width of the feed-forward layers, whose name differs between models."""
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return next((width for name in names if (width := getattr(config, name, None))), 4 * config.hidden_size)


def _head_parameters(config: Any) -> int:
    return config.vocab_size * config.hidden_size


def key_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
