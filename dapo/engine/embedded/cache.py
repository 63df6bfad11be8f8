"""The key/value cache of the embedded engine, and decode attention over it.

A prompt's keys and values are stored once for all responses to it; each response has a slot for its own tokens. The
active responses always occupy the first slots, so that a decode step reads the cache in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """A prompt in use. Once prefilled: per layer its keys and values [Hkv, P, D], and its last hidden state."""

    tokens: tuple[int, ...]
    users: int = 0  # unfinished responses to it
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    last_hidden: Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)


class ResponseCache:
    """Own tokens of the active responses: one tensor [2, layers, slots, Hkv, capacity, D] that grows as needed."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.empty(2, layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)

    def reserve(self, slots: int, capacity: int) -> None:
        _, _, had_slots, _, had_capacity, _ = self.storage.shape
        if slots <= had_slots and capacity <= had_capacity:
            return
        shape = list(self.storage.shape)
        shape[2] = max(slots, had_slots)
        shape[4] = max(capacity, min(2 * had_capacity, capacity + 512), had_capacity)
        grown = self.storage.new_zeros(shape)
        grown[:, :, :had_slots, :, :had_capacity] = self.storage
        self.storage = grown

    def move(self, source: int, target: int, length: int) -> None:
        if length == 0:  # a newcomer without cached tokens; its slot may not exist yet
            return
        self.storage[:, :, target, :, :length] = self.storage[:, :, source, :, :length]

    def release(self) -> None:
        shape = list(self.storage.shape)
        shape[2] = shape[4] = 0
        self.storage = self.storage.new_empty(shape)


class DecodeAttention:
    """One new token per active response: it sees the shared prompt and the response's own earlier tokens."""

    def __init__(
        self,
        cache: ResponseCache,
        lengths_B: Tensor,
        families: Sequence[tuple[SharedPrompt, Tensor]],
        dtype: torch.dtype,
    ) -> None:
        device = lengths_B.device
        _, _, _, kv_heads, capacity, _ = cache.storage.shape
        self.storage = cache.storage
        self.batch = len(lengths_B)
        self.span = int(lengths_B.max()) + 1
        self.prompt_span = max(prompt.length for prompt, _ in families)
        # Each prompt with the rows that continue it; a slice where those are all rows spares gathering them.
        self.families = [(p, slice(None) if len(rows) == self.batch else rows) for p, rows in families]
        heads = torch.arange(self.batch * kv_heads, device=device)
        # Where the new token's keys go in one layer's storage seen as [slots * Hkv * capacity, D].
        self.places = heads * capacity + lengths_B.repeat_interleave(kv_heads)
        # Scores and sums in float32 at least, as the training kernels have them.
        self.bias = self._bias(lengths_B, families, torch.promote_types(dtype, torch.float32))

    def _bias(self, lengths_B: Tensor, families: Sequence[tuple[SharedPrompt, Tensor]], dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, prompt span + own span]: -inf beyond the prompt's end, and beyond the row's own tokens."""
        bias = torch.zeros(self.batch, 1, 1, self.prompt_span + self.span, dtype=dtype, device=lengths_B.device)
        unseen = torch.arange(self.span, device=lengths_B.device)[None, :] > lengths_B[:, None]
        bias[:, 0, 0, self.prompt_span :].masked_fill_(unseen, float("-inf"))
        for prompt, rows in families:
            bias[rows, :, :, prompt.length : self.prompt_span] = float("-inf")
        return bias

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.storage[:, layer]
        kv_heads, head_dim = key.shape[1], key.shape[3]
        for cached, new in ((keys, key), (values, value)):
            cached.view(-1, head_dim).index_copy_(0, self.places, new[0].transpose(0, 1).reshape(-1, head_dim))
        groups = query.shape[1] // kv_heads
        narrow, wide = query.dtype, self.bias.dtype
        query = (query[0].transpose(0, 1).to(wide) * scale).reshape(self.batch, kv_heads, groups, head_dim)
        own_keys = keys[: self.batch, :, : self.span].to(wide)
        own_values = values[: self.batch, :, : self.span].to(wide)

        scores = query.new_empty(self.batch, kv_heads, groups, self.prompt_span + self.span)
        scores[..., self.prompt_span :] = query @ own_keys.transpose(2, 3)
        for prompt, rows in self.families:
            shared = _rows_to_heads(query[rows]) @ prompt.keys[layer].to(wide).transpose(1, 2)
            scores[rows, :, :, : prompt.length] = _heads_to_rows(shared, groups)
            scores[rows, :, :, prompt.length : self.prompt_span] = 0  # masked by the bias, but NaN + -inf is NaN
        weights = scores.add_(self.bias).softmax(-1)

        output = weights[..., self.prompt_span :] @ own_values
        for prompt, rows in self.families:
            shared = _rows_to_heads(weights[rows, :, :, : prompt.length]) @ prompt.values[layer].to(wide)
            output[rows] += _heads_to_rows(shared, groups)
        return output.view(1, self.batch, kv_heads * groups, head_dim).to(narrow)


def _rows_to_heads(values: Tensor) -> Tensor:
    """[B, Hkv, G, X] -> [Hkv, B * G, X]: all rows of one prompt in one product per key head."""
    return values.transpose(0, 1).flatten(1, 2)


def _heads_to_rows(values: Tensor, groups: int) -> Tensor:
    return values.unflatten(1, (-1, groups)).transpose(0, 1)
