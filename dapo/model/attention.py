"""The attention function that transformers calls in place of its own, and the plan for packed sequences.

The function holds no state: it hands queries, keys and values to the *plan* that the caller passed to the model's
forward. `PackedAttention` is the plan for training and prefill; the engine's decode step has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dapo.errors import ModelError

ATTENTION_NAME = "dapo"

# Up to this many tokens, a prompt and its responses attend as one block with a tree-shaped mask. The cost of the block
# grows with its square, so above this each response becomes a row of its own with the prompt's keys in front.
TREE_TOKENS = 512


class AttentionPlan(Protocol):
    applies_rotary: bool  # whether `attend` takes unrotated queries and keys, and rotates them itself by `cos_sin`

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        """Return the output [1, T, H, D] for query [1, H, T, D], key and value [1, Hkv, T, D].

        `cos_sin` is float32 [positions, D]: cosines in the first half of the columns, sines in the second.
        """
        ...


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not receive the attention plan that dapo.model.forward passes")
    # A sliding window is ignored here: check_model has refused windows shorter than the longest sequence.
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{type(module).__name__} uses soft-capped logits or sinks, which are not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return plan.attend(module.layer_idx, query, key, value, scale), None


# No mask function is registered, so transformers builds no mask and does not inspect the positions for one.
AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True, slots=True)
class Family:
    """One prompt in the pack and the responses that continue it, each as (start, length) in tokens."""

    prompt: tuple[int, int]
    responses: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return self.prompt[1] + sum(length for _, length in self.responses)


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens that attend together: indices into the pack, and the segment of each (0: prompt, i: i-th response)."""

    queries: Tensor
    keys: Tensor
    query_segments: Tensor
    key_segments: Tensor


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows of similar size, padded to one shape. Queries and keys are None if the rows are the whole pack in order."""

    queries: Tensor | None  # [B, Q]
    keys: Tensor | None  # [B, K]
    is_query: Tensor  # [B, Q] on the CPU, False for padding
    bias: Tensor  # [B, 1, G * Q, K], 0 where a query sees a key and -inf elsewhere
    shape: tuple[int, int, int]  # B, Q, K


class PackedAttention:
    """Causal attention over packed families: each prompt is stored once, and all its responses see it."""

    applies_rotary = False

    def __init__(
        self,
        families: Sequence[Family],
        positions_T: Tensor,
        query_groups: int,
        dtype: torch.dtype,
        *,
        capture: bool = False,
    ) -> None:
        self.captured: list[tuple[Tensor, Tensor]] | None = [] if capture else None
        self.query_groups = query_groups
        rows = [row for family in families for row in _rows(family)]
        buckets: dict[tuple[int, int], list[_Row]] = defaultdict(list)
        for row in rows:
            buckets[_size_class(len(row.queries)), _size_class(len(row.keys))].append(row)
        total = len(positions_T)
        self.buckets = [_bucket(members, positions_T, query_groups, dtype, total) for members in buckets.values()]
        self.inverse = self._inverse(total, positions_T.device)

    def _inverse(self, total: int, device: torch.device) -> Tensor | None:
        """Return the index of each token's output in the concatenated bucket outputs; None if they are in order."""
        if len(self.buckets) == 1 and self.buckets[0].queries is None:
            return None
        inverse = torch.empty(total, dtype=torch.long)
        offset = 0
        for bucket in self.buckets:
            assert bucket.queries is not None
            places = bucket.is_query.reshape(-1).nonzero()[:, 0]
            inverse[bucket.queries.reshape(-1).cpu()[places]] = offset + places
            offset += bucket.queries.numel()
        return inverse.to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        if self.captured is not None:
            self.captured.append((key[0].detach(), value[0].detach()))
        total, head_dim, kv_heads = query.shape[2], query.shape[3], key.shape[1]
        groups = self.query_groups
        query_T = query[0].transpose(0, 1).reshape(total, kv_heads * groups * head_dim)
        key_T = key[0].transpose(0, 1).reshape(total, kv_heads * head_dim)
        value_T = value[0].transpose(0, 1).reshape(total, kv_heads * head_dim)
        outputs = []
        for bucket in self.buckets:
            b, q, k = bucket.shape
            # The query heads that share a key head become extra query rows, so that keys need not be repeated.
            rows = _take(query_T, bucket.queries).view(b, q, kv_heads, groups, head_dim)
            rows = rows.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, groups * q, head_dim)
            keys = _take(key_T, bucket.keys).view(b, k, kv_heads, head_dim).transpose(1, 2)
            values = _take(value_T, bucket.keys).view(b, k, kv_heads, head_dim).transpose(1, 2)
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bucket.bias, scale=scale)
            out = out.view(b, kv_heads, groups, q, head_dim).permute(0, 3, 1, 2, 4)
            outputs.append(out.reshape(b * q, kv_heads * groups * head_dim))
        output_T = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        output_T = _take(output_T, self.inverse)
        return output_T.view(1, total, kv_heads * groups, head_dim)


def _take(values_T: Tensor, index: Tensor | None) -> Tensor:
    return values_T if index is None else values_T.index_select(0, index.reshape(-1))


def _rows(family: Family) -> list[_Row]:
    """Return one row for a small family, else one for the prompt and one for each response behind the prompt's keys."""
    start, length = family.prompt
    prompt = torch.arange(start, start + length)
    responses = [torch.arange(s, s + n) for s, n in family.responses if n > 0]
    if family.tokens <= TREE_TOKENS:
        tokens = torch.cat([prompt, *responses])
        parts = [torch.full((len(part),), i) for i, part in enumerate([prompt, *responses])]
        segments = torch.cat(parts)
        return [_Row(tokens, tokens, segments, segments)]
    zeros = torch.zeros(length, dtype=torch.long)
    rows = [_Row(prompt, prompt, zeros, zeros)]
    for response in responses:
        ones = torch.ones(len(response), dtype=torch.long)
        rows.append(_Row(response, torch.cat([prompt, response]), ones, torch.cat([zeros, ones])))
    return rows


def _size_class(length: int) -> int:
    """Round a length up so that lengths within about a quarter share a bucket, which bounds the padding."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _bucket(rows: list[_Row], positions_T: Tensor, query_groups: int, dtype: torch.dtype, total: int) -> _Bucket:
    device = positions_T.device
    b, q, k = len(rows), max(len(row.queries) for row in rows), max(len(row.keys) for row in rows)
    queries = torch.stack([_padded(row.queries, q, int(row.queries[0])) for row in rows])
    keys = torch.stack([_padded(row.keys, k, int(row.keys[0])) for row in rows])
    # Padding has segment -1 among queries and -2 among keys, so it matches nothing.
    query_segments = torch.stack([_padded(row.query_segments, q, -1) for row in rows])[:, :, None]
    key_segments = torch.stack([_padded(row.key_segments, k, -2) for row in rows])[:, None, :]
    positions = positions_T.cpu()
    # A query sees the prompt and its own segment, up to its own position.
    sees = (key_segments == 0) | (key_segments == query_segments)
    sees &= positions[keys][:, None, :] <= positions[queries][:, :, None]
    sees[:, :, 0] |= query_segments[:, :, 0] == -1  # a padded query must see one key, or its softmax is NaN
    bias = torch.zeros(b, 1, q, k, dtype=dtype).masked_fill_(~sees[:, None], float("-inf"))
    bias = bias.repeat(1, 1, query_groups, 1)
    whole = b * q == total and b * k == total and torch.equal(queries.reshape(-1), torch.arange(total))
    return _Bucket(
        queries=None if whole else queries.to(device),
        keys=None if whole else keys.to(device),
        is_query=query_segments[:, :, 0] >= 0,
        bias=bias.to(device),
        shape=(b, q, k),
    )


def _padded(values: Tensor, length: int, fill: int) -> Tensor:
    return F.pad(values, (0, length - len(values)), value=fill)
