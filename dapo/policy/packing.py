"""Packing of groups into micro-batches without padding, in which a prompt is computed once for all its responses."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dapo.algorithm.loss import AggregationMode, token_weight
from dapo.model.attention import Family
from dapo.types import Group, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A micro-batch: T packed input tokens, R response tokens to learn from.

    A response's last token is never an input. Its first token is predicted by the prompt's last hidden state, which all
    responses to that prompt share. Tokens that an environment gave are inputs, and not among the R. Turns that several
    episodes have in common are computed for each of them: only the prompt is shared.
    """

    tokens_T: Tensor
    positions_T: Tensor
    families: tuple[Family, ...]
    rollouts: tuple[Rollout, ...]  # in the order of the R tensors; empty for a filler, whose result is ignored
    predictors_R: Tensor  # index of the hidden state that predicts the token
    targets_R: Tensor
    advantages_R: Tensor
    old_logprobs_R: Tensor
    responses_R: Tensor  # number of the token's response, from 1; 0: padding. A response is never cut
    ref_logprobs_R: Tensor | None
    start_logprobs_R: Tensor | None
    weights_R: Tensor  # of each token's loss in the loss of the whole mini-batch
    is_current_R: Tensor  # whether the token's group was sampled by the weights that the update starts from


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One rollout to pack."""

    group: Group
    index: int
    weight: float
    is_current: bool

    @property
    def rollout(self) -> Rollout:
        return self.group.rollouts[self.index]

    @property
    def inputs(self) -> int:
        """Response tokens that are inputs: all but the last."""
        return len(self.rollout) - 1

    def of_own(self, values_L: np.ndarray) -> np.ndarray:
        """Return the values at the model's own tokens."""
        return values_L[self.rollout.is_own] if self.rollout.given else values_L


def mini_batches(
    groups: Sequence[Group], size: int, seed: int, step: int, epoch: int, *, batch_size: int
) -> list[list[Group]]:
    """Shuffle groups by (seed, step, epoch) and split them into near-equal parts of at most `size` groups.

    In flight a batch can hold more than `batch_size` groups. A few more make each part larger, not one more part.
    """
    if not groups:
        return []
    order = np.random.default_rng((seed, step, epoch)).permutation(len(groups))
    whole_batches = max(1, round(len(groups) / batch_size))
    count = whole_batches * math.ceil(min(len(groups), batch_size) / size)
    parts = np.array_split(order, min(count, len(groups)))
    return [[groups[i] for i in part] for part in parts]


def micro_batches(
    groups: Sequence[Group],
    mode: AggregationMode,
    max_tokens: int,
    version: int,
    like: Tensor,
    *,
    share_prompts: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> list[Batch]:
    """Pack the trained rollouts of one mini-batch into micro-batches of at most `max_tokens` inputs.

    Token weights use the counts of the whole mini-batch, so the gradient does not depend on the split. Tensors are on
    the device of `like`, in float32, or in float64 if `like` is. Each rank gets about the same number of tokens and
    exactly the same number of micro-batches.
    """
    pairs = [(group, i) for group in groups for i in np.flatnonzero(group.trains)]
    total_tokens = sum(group.rollouts[i].sampled for group, i in pairs)
    items = [
        _Item(
            group=group,
            index=int(i),
            weight=token_weight(mode, group.rollouts[i].sampled, total_tokens, len(pairs)),
            is_current=all(r.weight_version == version and not r.switches for r in group.rollouts),
        )
        for group, i in pairs
    ]
    return _packed(items, max_tokens, like, share_prompts, rank, ranks)


def reference_batches(
    groups: Sequence[Group], max_tokens: int, like: Tensor, *, rank: int = 0, ranks: int = 1
) -> list[Batch]:
    """Pack every rollout of these groups, trained or not, to compute log-probabilities only."""
    items = [_Item(group, i, 0.0, False) for group in groups for i in range(len(group.rollouts))]
    return _packed(items, max_tokens, like, True, rank, ranks)


def _packed(
    items: list[_Item], max_tokens: int, like: Tensor, share_prompts: bool, rank: int, ranks: int
) -> list[Batch]:
    if ranks == 1:
        return [_pack(part, like, share_prompts) for part in _cut(items, max_tokens, share_prompts)]
    cuts = [list(_cut(share, max_tokens, share_prompts)) for share in _split_over_ranks(items, ranks, share_prompts)]
    own = cuts[rank] if rank < len(cuts) else []
    batches = [_pack(part, like, share_prompts) for part in own]
    missing = max(map(len, cuts), default=0) - len(own)
    return batches + [_filler(items, like)] * missing


def _split_over_ranks(items: list[_Item], ranks: int, share_prompts: bool) -> list[list[_Item]]:
    """Split items into at most one share per rank, with the smallest possible largest share.

    Binary search for the smallest limit at which `_cut` needs no more than `ranks` parts.
    """
    if not items:
        return []
    most = sum(item.inputs + len(item.group.prompt.tokens) for item in items)
    limit = bisect_left(
        range(most), True, key=lambda tokens: sum(1 for _ in _cut(items, tokens, share_prompts)) <= ranks
    )
    return list(_cut(items, limit, share_prompts))


def _filler(items: list[_Item], like: Tensor) -> Batch:
    """Return a small micro-batch of weight zero, for a rank that has fewer micro-batches than others.

    Forward and backward are collective, so all ranks must run the same number of them.
    """
    smallest = min(items, key=lambda item: item.inputs + len(item.group.prompt.tokens))
    batch = _pack([replace(smallest, weight=0.0, is_current=False)], like, share_prompts=True)
    # A weight of zero times an advantage that is not finite would be NaN.
    return replace(batch, rollouts=(), advantages_R=torch.zeros_like(batch.advantages_R))


def _cut(items: list[_Item], max_tokens: int, share_prompts: bool) -> Iterator[list[_Item]]:
    """Cut items into parts of at most `max_tokens` inputs, with equal prompts side by side.

    A single rollout that is longer than that is a part of its own.
    """
    first_seen: dict[tuple[int, ...], int] = {}
    for item in items:
        first_seen.setdefault(item.group.prompt.tokens, len(first_seen))
    items = sorted(items, key=lambda item: first_seen[item.group.prompt.tokens])
    part: list[_Item] = []
    used = 0
    for item in items:
        prompt = item.group.prompt.tokens
        is_new = not share_prompts or not part or part[-1].group.prompt.tokens != prompt
        cost = item.inputs + (len(prompt) if is_new else 0)
        if part and used + cost > max_tokens:
            yield part
            part, used, cost = [], 0, item.inputs + len(prompt)
        part.append(item)
        used += cost
    if part:
        yield part


def _pack(items: list[_Item], like: Tensor, share_prompts: bool) -> Batch:
    """Lay out prompt, response 1, ..., response n of each prompt one after the other."""
    device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
    families: list[Family] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    cursor = 0
    for prompt, members in _by_prompt(items, share_prompts):
        start, length = cursor, len(prompt)
        tokens.append(np.array(prompt))
        positions.append(np.arange(length))
        cursor += length
        responses = []
        for item in members:
            inputs = item.inputs
            tokens.append(item.rollout.tokens[:-1])
            positions.append(np.arange(length, length + inputs))
            # Token 0 is predicted by the prompt's last token, token i by token i - 1 of the response.
            predictors.append(item.of_own(np.concatenate([[start + length - 1], np.arange(cursor, cursor + inputs)])))
            responses.append((cursor, inputs))
            cursor += inputs
        families.append(Family((start, length), tuple(responses)))

    def logprobs(name: Literal["ref_logprobs", "start_logprobs"]) -> Tensor | None:
        if getattr(items[0].group, name) is None:
            return None
        return _tensor([item.of_own(getattr(item.group, name)[item.index]) for item in items], dtype, device)

    return Batch(
        tokens_T=_tensor(tokens, torch.long, device),
        positions_T=_tensor(positions, torch.long, device),
        families=tuple(families),
        rollouts=tuple(item.rollout for item in items),
        predictors_R=_tensor(predictors, torch.long, device),
        targets_R=_tensor([item.of_own(item.rollout.tokens) for item in items], torch.long, device),
        advantages_R=_per_token(items, [item.group.advantages[item.index] for item in items], dtype, device),
        old_logprobs_R=_tensor([item.of_own(item.rollout.logprobs) for item in items], dtype, device),
        responses_R=_per_token(items, range(1, len(items) + 1), torch.long, device),
        ref_logprobs_R=logprobs("ref_logprobs"),
        start_logprobs_R=logprobs("start_logprobs"),
        weights_R=_per_token(items, [item.weight for item in items], dtype, device),
        is_current_R=_per_token(items, [item.is_current for item in items], torch.bool, device),
    )


def _by_prompt(items: list[_Item], share_prompts: bool) -> Iterator[tuple[tuple[int, ...], list[_Item]]]:
    """Yield each prompt with the consecutive items that share it."""
    members: list[_Item] = []
    for item in items:
        if members and (not share_prompts or members[-1].group.prompt.tokens != item.group.prompt.tokens):
            yield members[0].group.prompt.tokens, members
            members = []
        members.append(item)
    yield members[0].group.prompt.tokens, members


def _tensor(parts: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)


def _per_token(items: list[_Item], values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Repeat one value per rollout for each of the model's tokens in it."""
    spread = np.repeat(np.array(values), [item.rollout.sampled for item in items])
    return torch.from_numpy(spread).to(device=device, dtype=dtype)
