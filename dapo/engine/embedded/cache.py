"""The key/value cache of the embedded engine, and decode attention over it.

A prompt's keys and values are stored once for all responses to it; each response has a slot for its own tokens. The
active responses always occupy the first slots, so that a decode step reads the cache in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.engine.embedded.sequence import SharedPrompt


@dataclass(frozen=True, eq=False, slots=True)
class CachedPrompt:
    """Per layer the keys and values [Hkv, P, D] of a prompt, and its last hidden state."""

    keys: list[Tensor]
    values: list[Tensor]
    last_hidden: Tensor


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


class PromptStack:
    """Several prompts side by side, per layer keys and values [prompts, Hkv, longest, D]: one product serves all."""

    def __init__(self, prompts: Sequence[SharedPrompt], dtype: torch.dtype) -> None:
        self.prompts = tuple(prompts)
        self.span = max(prompt.length for prompt in prompts)
        cached: list[CachedPrompt] = [prompt.cached for prompt in prompts]
        layers = range(len(cached[0].keys))
        self.keys = [self._stacked([prompt.keys[layer] for prompt in cached], dtype) for layer in layers]
        self.values = [self._stacked([prompt.values[layer] for prompt in cached], dtype) for layer in layers]

    def _stacked(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if len(parts) == 1:
            return parts[0][None].to(dtype)
        kv_heads, _, head_dim = parts[0].shape
        stack = torch.zeros(len(parts), kv_heads, self.span, head_dim, dtype=dtype, device=parts[0].device)
        for place, part in enumerate(parts):
            stack[place, :, : part.shape[1]] = part
        return stack


class DecodeAttention:
    """One new token per active response: it sees the shared prompt and the response's own earlier tokens.

    The responses to a prompt are the rows of one product with its keys. Prompts with fewer responses than the most have
    empty rows, so that all prompts are one batched product, whatever their number.
    """

    applies_rotary = False

    def __init__(self, cache: ResponseCache, stack: PromptStack, lengths_B: Tensor, prompts: Sequence[int]) -> None:
        """`prompts`: for each response the place of its prompt in the stack."""
        device = lengths_B.device
        _, _, _, kv_heads, capacity, _ = cache.storage.shape
        self.storage = cache.storage
        self.stack = stack
        self.batch = len(prompts)
        self.span = int(lengths_B.max()) + 1
        members = [0] * len(stack.prompts)
        rows = []
        for prompt in prompts:
            rows.append(members[prompt])
            members[prompt] += 1
        self.rows = max(members)  # per prompt
        # Where each response stands among prompts * rows; None where that is its own place anyway.
        places = [prompt * self.rows + row for prompt, row in zip(prompts, rows, strict=True)]
        self.rows_B = None if len(members) == 1 else torch.tensor(places, device=device)
        heads = torch.arange(self.batch * kv_heads, device=device)
        # Where the new token's keys go in one layer's storage seen as [slots * Hkv * capacity, D].
        self.places = heads * capacity + lengths_B.repeat_interleave(kv_heads)
        prompt_lengths = [stack.prompts[prompt].length for prompt in prompts]
        self.bias = self._bias(lengths_B, torch.tensor(prompt_lengths, device=device))

    def _bias(self, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
        """[B, 1, 1, prompt span + own span]: -inf beyond the prompt's end, and beyond the row's own tokens."""
        device = lengths_B.device
        beyond = torch.arange(self.stack.span, device=device)[None, :] >= prompt_lengths_B[:, None]
        unseen = torch.arange(self.span, device=device)[None, :] > lengths_B[:, None]
        hidden = torch.cat([beyond, unseen], dim=1)[:, None, None]
        dtype = self.stack.keys[0].dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        keys, values = self.storage[:, layer]
        kv_heads, head_dim = key.shape[1], key.shape[3]
        for cached, new in ((keys, key), (values, value)):
            cached.view(-1, head_dim).index_copy_(0, self.places, new[0].transpose(0, 1).reshape(-1, head_dim))
        groups = query.shape[1] // kv_heads
        narrow, wide, span = query.dtype, self.bias.dtype, self.stack.span
        query = (query[0].transpose(0, 1).to(wide) * scale).reshape(self.batch, kv_heads, groups, head_dim)
        own_keys = keys[: self.batch, :, : self.span].to(wide)
        own_values = values[: self.batch, :, : self.span].to(wide)

        scores = query.new_empty(self.batch, kv_heads, groups, span + self.span)
        scores[..., span:] = query @ own_keys.transpose(2, 3)
        shared = self._by_prompt(query) @ self.stack.keys[layer].transpose(2, 3)
        scores[..., :span] = self._by_response(shared, groups)
        weights = scores.add_(self.bias).softmax(-1)

        output = weights[..., span:] @ own_values
        shared = self._by_prompt(weights[..., :span]) @ self.stack.values[layer]
        output += self._by_response(shared, groups)
        return output.view(1, self.batch, kv_heads * groups, head_dim).to(narrow)

    def _by_prompt(self, values: Tensor) -> Tensor:
        """[B, Hkv, G, X] -> [prompts, Hkv, rows * G, X]"""
        if self.rows_B is not None:
            padded = values.new_zeros(len(self.stack.prompts) * self.rows, *values.shape[1:])
            values = padded.index_copy_(0, self.rows_B, values)
        return values.unflatten(0, (-1, self.rows)).transpose(1, 2).flatten(2, 3)

    def _by_response(self, values: Tensor, groups: int) -> Tensor:
        """[prompts, Hkv, rows * G, X] -> [B, Hkv, G, X]"""
        values = values.unflatten(2, (self.rows, groups)).transpose(1, 2).flatten(0, 1)
        return values if self.rows_B is None else values[self.rows_B]
