"""The key/value cache of the decoder for CPUs, and decode attention over it.

A prompt's keys and values are stored once for all responses to it. Each response has a slot for its own tokens. The
active responses always occupy the first slots, so that a decode step reads the cache in place.

Shapes: B responses in the batch, Hkv key/value heads, G query heads per key/value head, D head size, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.engine.embedded.sequence import SharedPrompt
from dapo.kernels import native


@dataclass(frozen=True, eq=False, slots=True)
class CachedPrompt:
    """The keys and values [Hkv, P, D] of a prompt in each layer, and its last hidden state."""

    keys: list[Tensor]
    values: list[Tensor]
    last_hidden: Tensor


class ResponseCache:
    """Keys and values of the responses' own tokens: one growing tensor [2, layers, slots, Hkv, capacity, D]."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.empty(2, layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for `slots` responses of `capacity` tokens each. Slots beyond these may be given up."""
        _, _, old_slots, _, old_capacity, _ = self.storage.shape
        if slots <= old_slots and capacity <= old_capacity:
            return
        shape = list(self.storage.shape)
        # When the responses get longer, finished ones leave no slot behind: the longest run alone at the end of a step.
        shape[2], kept = slots, min(slots, old_slots)
        # Double, so that copies are rare, but never reserve more than 512 unused tokens per slot.
        shape[4] = max(capacity, min(2 * old_capacity, capacity + 512), old_capacity)
        grown = self.storage.new_zeros(shape)
        grown[:, :, :kept, :, :old_capacity] = self.storage[:, :, :kept]
        self.storage = grown

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        if length == 0:  # a newcomer without cached tokens, whose slot may not exist yet
            return
        self.storage[:, :, target, :, :length] = self.storage[:, :, source, :, :length]

    def copy(self, slot: int, length: int) -> Tensor:
        """Return a copy of the first `length` tokens of a slot, [2, layers, Hkv, length, D]."""
        if length == 0:  # its slot may not exist yet
            return self.storage.new_empty(*self.storage.shape[:2], self.storage.shape[3], 0, self.storage.shape[5])
        return self.storage[:, :, slot, :, :length].clone()

    def release(self) -> None:
        shape = list(self.storage.shape)
        shape[2] = shape[4] = 0
        self.storage = self.storage.new_empty(shape)


class PromptStack:
    """The prompts of a batch, padded to the longest: in each layer keys and values [prompts, Hkv, longest, D].

    Attention to all prompts is then one batched matrix product.
    """

    def __init__(self, prompts: Sequence[SharedPrompt], dtype: torch.dtype) -> None:
        self.prompts = tuple(prompts)
        self.span = max(prompt.length for prompt in prompts)
        cached: list[CachedPrompt] = [prompt.cached for prompt in prompts]
        layers = range(len(cached[0].keys))
        self.keys = [self._pad_and_stack([prompt.keys[layer] for prompt in cached], dtype) for layer in layers]
        self.values = [self._pad_and_stack([prompt.values[layer] for prompt in cached], dtype) for layer in layers]

    def _pad_and_stack(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if len(parts) == 1:
            return parts[0][None].to(dtype).contiguous()
        kv_heads, _, head_dim = parts[0].shape
        stack = torch.zeros(len(parts), kv_heads, self.span, head_dim, dtype=dtype, device=parts[0].device)
        for index, part in enumerate(parts):
            stack[index, :, : part.shape[1]] = part
        return stack


class DecodeAttention:
    """Attention of one new token per active response to the shared prompt and to the response's own earlier tokens.

    Scores against the prompts are one batched product: all responses to a prompt are the rows of one matrix, which is
    multiplied with the prompt's keys. Prompts with fewer responses than others are padded with zero rows.
    """

    applies_rotary = False

    def __init__(self, cache: ResponseCache, stack: PromptStack, lengths_B: Tensor, prompts: Sequence[int]) -> None:
        """Prepare one decode step. `prompts[b]` is the index in `stack` of the prompt of response b."""
        device = lengths_B.device
        _, _, _, kv_heads, capacity, _ = cache.storage.shape
        self.storage = cache.storage
        self.stack = stack
        self.batch = len(prompts)
        self.span = int(lengths_B.max()) + 1  # own tokens of the longest response, with the new one
        counts = [0] * len(stack.prompts)  # responses to each prompt so far
        rows = []
        for prompt in prompts:
            rows.append(counts[prompt])
            counts[prompt] += 1
        self.rows = max(counts)  # rows per prompt
        # The row of each response in a [prompts * rows] matrix; None where row b is response b and none is padding.
        indices = [prompt * self.rows + row for prompt, row in zip(prompts, rows, strict=True)]
        is_in_order = indices == [*range(len(counts) * self.rows)]
        self.rows_B = None if is_in_order else torch.tensor(indices, device=device)
        heads = torch.arange(self.batch * kv_heads, device=device)
        # Where the new token's keys go in one layer's storage, viewed as [slots * Hkv * capacity, D].
        self.write_indices = heads * capacity + lengths_B.repeat_interleave(kv_heads)
        prompt_lengths = [stack.prompts[prompt].length for prompt in prompts]
        self.bias = self._bias(lengths_B, torch.tensor(prompt_lengths, device=device))
        # Own keys and values of one layer in the dtype of the scores. All layers use the same memory: fresh memory of
        # this size costs more than the conversion, because the kernel must clear its pages.
        self.widened: Tensor | None = None
        if cache.storage.dtype != self.bias.dtype:
            self.widened = self.bias.new_empty(2, self.batch, kv_heads, self.span, cache.storage.shape[-1])

    def _bias(self, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
        """Return [B, 1, 1, prompt span + own span]: -inf beyond the end of the prompt and of the own tokens."""
        device = lengths_B.device
        prompt_padding = torch.arange(self.stack.span, device=device)[None, :] >= prompt_lengths_B[:, None]
        # Not >=: the new token, at index `length`, sees itself.
        own_padding = torch.arange(self.span, device=device)[None, :] > lengths_B[:, None]
        hidden = torch.cat([prompt_padding, own_padding], dim=1)[:, None, None]
        dtype = self.stack.keys[0].dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        keys, values = self.storage[:, layer]
        kv_heads, head_dim = key.shape[1], key.shape[3]
        for cached, new in ((keys, key), (values, value)):
            cached.view(-1, head_dim).index_copy_(0, self.write_indices, new[0].transpose(0, 1).reshape(-1, head_dim))
        groups = query.shape[1] // kv_heads
        narrow, wide, span = query.dtype, self.bias.dtype, self.stack.span
        query = (query[0].transpose(0, 1).to(wide) * scale).reshape(self.batch, kv_heads, groups, head_dim)
        own_keys, own_values = self._own(layer)

        # One softmax over prompt and own tokens; the two parts are computed by different products.
        scores = query.new_empty(self.batch, kv_heads, groups, span + self.span)
        scores[..., span:] = query @ own_keys.transpose(2, 3)
        shared = self._by_prompt(query) @ self.stack.keys[layer].transpose(2, 3)
        scores[..., :span] = self._by_response(shared, groups)
        weights = scores.add_(self.bias).softmax(-1)

        output = weights[..., span:] @ own_values
        shared = self._by_prompt(weights[..., :span]) @ self.stack.values[layer]
        output += self._by_response(shared, groups)
        return output.view(1, self.batch, kv_heads * groups, head_dim).to(narrow)

    def _own(self, layer: int) -> Tensor:
        """Return the own keys and values [2, B, Hkv, own span, D], at least in float32."""
        own = self.storage[:, layer, : self.batch, :, : self.span]
        return own if self.widened is None else self.widened.copy_(own)

    def _by_prompt(self, values: Tensor) -> Tensor:
        """Regroup [B, Hkv, G, X] -> [prompts, Hkv, rows * G, X]."""
        if self.rows_B is not None:
            padded = values.new_zeros(len(self.stack.prompts) * self.rows, *values.shape[1:])
            values = padded.index_copy_(0, self.rows_B, values)
        return values.unflatten(0, (-1, self.rows)).transpose(1, 2).flatten(2, 3)

    def _by_response(self, values: Tensor, groups: int) -> Tensor:
        """Undo `_by_prompt`: [prompts, Hkv, rows * G, X] -> [B, Hkv, G, X]."""
        values = values.unflatten(2, (self.rows, groups)).transpose(1, 2).flatten(0, 1)
        return values if self.rows_B is None else values[self.rows_B]


class NativeDecodeAttention:
    """The same with the kernels in C, also for tokens that environments gave: one or several tokens per response.

    The keys and values of all tokens are stored first; a token attends to its prompt and to the own tokens up to it.
    """

    applies_rotary = False

    def __init__(
        self, cache: ResponseCache, stack: PromptStack, tokens: Sequence[tuple[int, int]], prompts: Sequence[int]
    ) -> None:
        """Prepare one decode step for tokens given by slot and place. `prompts[s]` is the index of slot s's prompt."""
        self.cache, self.stack = cache, stack
        _, _, _, self.kv_heads, capacity, self.head_dim = cache.storage.shape
        slots_T, places_T = torch.tensor(tokens).unbind(1)
        prompts_T = torch.tensor(prompts)[slots_T]
        lengths_T = torch.tensor([prompt.length for prompt in stack.prompts])[prompts_T]
        own_starts_T = slots_T * (self.kv_heads * capacity * self.head_dim)
        self.places_T = own_starts_T + places_T * self.head_dim
        self.prompt = native.Spans(prompts_T * (self.kv_heads * stack.span * self.head_dim), lengths_T)
        self.own = native.Spans(own_starts_T, places_T + 1)
        self.own_stride, self.prompt_stride = capacity * self.head_dim, stack.span * self.head_dim
        self.longest = int((lengths_T + places_T).max()) + 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        keys, values = self.cache.storage[:, layer]
        query_THD, key_THD, value_THD = (each[0].transpose(0, 1) for each in (query, key, value))
        native.store(key_THD, value_THD, keys, values, self.places_T, self.own_stride)
        prompt = self.prompt.of(self.stack.keys[layer], self.stack.values[layer], self.head_dim, self.prompt_stride)
        own = self.own.of(keys, values, self.head_dim, self.own_stride)
        return native.attention(query_THD, (prompt, own), self.kv_heads, self.longest, scale)[None]


class CacheSpan(NamedTuple):
    """The own tokens `start` to `end` of one response, to be computed into its slot."""

    prompt: CachedPrompt
    slot: int
    start: int
    end: int


class ExtendAttention:
    """Attention of spans of tokens to the prompt and the own tokens before them. It stores their keys and values.

    The tokens of the decode step `newest` come first. The newest token of a response may follow its span, so the keys
    of spans are stored before that token attends.
    """

    applies_rotary = False

    def __init__(self, newest: DecodeAttention, spans: Sequence[CacheSpan]) -> None:
        self.newest, self.storage, self.spans = newest, newest.storage, spans

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        outputs, first = [], self.newest.batch
        for span in self.spans:
            tokens = slice(first, first + span.end - span.start)
            parts = (each[0, :, tokens] for each in (query, key, value))
            outputs.append(self._attend(layer, span, *parts, scale=scale))
            first = tokens.stop
        batch = self.newest.batch
        newest = self.newest.attend(layer, query[:, :, :batch], key[:, :, :batch], value[:, :, :batch], scale)
        return torch.cat([newest, torch.cat(outputs, dim=1).transpose(0, 1)[None].to(query.dtype)], dim=1)

    def _attend(
        self, layer: int, span: CacheSpan, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        prompt, slot, start, end = span
        for part, new in enumerate((key, value)):
            self.storage[part, layer, slot, :, start:end] = new
        own_keys, own_values = self.storage[:, layer, slot, :, :end]
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = torch.cat([prompt.keys[layer], own_keys], 1), torch.cat([prompt.values[layer], own_values], 1)
        seen = keys.shape[1] - (end - start) + torch.arange(end - start, device=query.device)  # the last key of each
        bias = torch.arange(keys.shape[1], device=query.device) <= seen[:, None]
        groups = query.shape[0] // keys.shape[0]
        keys, values = (each.to(wide).repeat_interleave(groups, dim=0) for each in (keys, values))
        return F.scaled_dot_product_attention(query.to(wide)[None], keys[None], values[None], bias, scale=scale)[0]
