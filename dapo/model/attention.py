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
from dapo.model.meter import causal_pairs

ATTENTION_NAME = "dapo"

# Up to this many tokens, a prompt and its responses attend as one block with a tree-shaped mask. The cost of the block
# grows with its square, so above this each response becomes a row of its own with the prompt's keys in front.
TREE_TOKENS = 512
_NO_QUERY = -1  # segment of a query whose output is not used


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
    """One prompt in the pack and the responses that continue it, each as (start, length) in tokens.

    The last `shared` tokens of the prompt were sampled: all responses begin with them.
    """

    prompt: tuple[int, int]
    responses: tuple[tuple[int, int], ...] = ()
    shared: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt[1] + sum(length for _, length in self.responses)

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        prefix = self.prompt[1]
        return causal_pairs([prefix]) + sum(prefix * length + causal_pairs([length]) for _, length in self.responses)


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens that attend together: indices into the pack, and the segment of each (0: prompt, i: i-th response).

    A causal row has the same queries and keys, in order, and needs no mask: that would take 256 MB for 8,192 tokens.
    """

    queries: Tensor
    keys: Tensor
    query_segments: Tensor
    key_segments: Tensor
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows of similar size, padded to one shape. Queries and keys are None if the rows are the whole pack in order."""

    queries: Tensor | None  # [B, Q]
    keys: Tensor | None  # [B, K]
    is_query: Tensor  # [B, Q] on the CPU, False for padding
    bias: Tensor | None  # [B, 1, G * Q, K], 0 where a query sees a key and -inf elsewhere; None: causal
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
        buckets: dict[tuple[bool, int, int], list[_Row]] = defaultdict(list)
        for row in rows:
            buckets[row.is_causal, _size_class(len(row.queries)), _size_class(len(row.keys))].append(row)
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
            rows = _take(query_T, bucket.queries).view(b, q, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
            keys = _take(key_T, bucket.keys).view(b, k, kv_heads, head_dim).transpose(1, 2)
            values = _take(value_T, bucket.keys).view(b, k, kv_heads, head_dim).transpose(1, 2)
            if bucket.bias is None:
                rows, keys, values = rows.flatten(1, 2), _repeat(keys, groups), _repeat(values, groups)
                out = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scale)
            else:
                # The query heads that share a key head become extra query rows, so that keys need not be repeated.
                rows = rows.flatten(2, 3)
                out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bucket.bias, scale=scale)
            out = out.view(b, kv_heads, groups, q, head_dim).permute(0, 3, 1, 2, 4)
            outputs.append(out.reshape(b * q, kv_heads * groups * head_dim))
        output_T = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        output_T = _take(output_T, self.inverse)
        return output_T.view(1, total, kv_heads * groups, head_dim)


def _take(values_T: Tensor, index: Tensor | None) -> Tensor:
    return values_T if index is None else values_T.index_select(0, index.reshape(-1))


def _repeat(heads: Tensor, groups: int) -> Tensor:
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _rows(family: Family) -> list[_Row]:
    """Return one row for a small family, else one for each response behind the prompt's keys.

    A mask costs the whole rectangle of queries and keys, a causal row half the square of the keys. So a response as
    long as the prompt or longer is a causal row with the prompt in front; the first such row gives the prompt's output.
    """
    start, length = family.prompt
    prompt = torch.arange(start, start + length)
    responses = [torch.arange(s, s + n) for s, n in family.responses if n > 0]
    if family.tokens <= TREE_TOKENS:
        tokens = torch.cat([prompt, *responses])
        parts = [torch.full((len(part),), i) for i, part in enumerate([prompt, *responses])]
        segments = torch.cat(parts)
        return [_Row(tokens, tokens, segments, segments)]
    long = [response for response in responses if len(response) >= length]
    rows = [_causal_row(prompt, response, is_first=at == 0) for at, response in enumerate(long)]
    if not long:
        rows.append(_causal_row(prompt, prompt[:0], is_first=True))
    zeros = torch.zeros(length, dtype=torch.long)
    for response in responses:
        if len(response) < length:
            ones = torch.ones(len(response), dtype=torch.long)
            rows.append(_Row(response, torch.cat([prompt, response]), ones, torch.cat([zeros, ones])))
    return rows


def _causal_row(prompt: Tensor, response: Tensor, *, is_first: bool) -> _Row:
    tokens = torch.cat([prompt, response])
    segments = torch.zeros(len(tokens), dtype=torch.long)
    segments[: len(prompt)] = 0 if is_first else _NO_QUERY
    return _Row(tokens, tokens, segments, segments, is_causal=True)


def _size_class(length: int) -> int:
    """Round a length up so that lengths within about a quarter share a bucket, which bounds the padding."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _bucket(rows: list[_Row], positions_T: Tensor, query_groups: int, dtype: torch.dtype, total: int) -> _Bucket:
    device = positions_T.device
    b, q, k = len(rows), max(len(row.queries) for row in rows), max(len(row.keys) for row in rows)
    queries = torch.stack([_padded(row.queries, q, int(row.queries[0])) for row in rows])
    keys = torch.stack([_padded(row.keys, k, int(row.keys[0])) for row in rows])
    query_segments = torch.stack([_padded(row.query_segments, q, _NO_QUERY) for row in rows])
    bias = None if rows[0].is_causal else _bias(rows, queries, keys, query_segments, positions_T.cpu())
    if bias is not None:
        bias = bias.to(device, dtype).repeat(1, 1, query_groups, 1)
    whole = b * q == total and b * k == total and torch.equal(queries.reshape(-1), torch.arange(total))
    return _Bucket(
        queries=None if whole else queries.to(device),
        keys=None if whole else keys.to(device),
        is_query=query_segments != _NO_QUERY,
        bias=bias,
        shape=(b, q, k),
    )


def _bias(rows: list[_Row], queries: Tensor, keys: Tensor, query_segments: Tensor, positions_T: Tensor) -> Tensor:
    """Return [B, 1, Q, K], 0 where a query sees a key and -inf elsewhere."""
    # Padding among the keys has segment -2, so it matches no query.
    key_segments = torch.stack([_padded(row.key_segments, keys.shape[1], -2) for row in rows])[:, None, :]
    # A query sees the prompt and its own segment, up to its own position.
    sees = (key_segments == 0) | (key_segments == query_segments[:, :, None])
    sees &= positions_T[keys][:, None, :] <= positions_T[queries][:, :, None]
    sees[:, :, 0] |= query_segments == _NO_QUERY  # a padded query must see one key, or its softmax is NaN
    return torch.zeros(sees.shape).masked_fill_(~sees, float("-inf"))[:, None]


def _padded(values: Tensor, length: int, fill: int) -> Tensor:
    return F.pad(values, (0, length - len(values)), value=fill)
