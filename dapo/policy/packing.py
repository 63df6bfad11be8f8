"""Packing of groups into micro-batches without padding, in which responses share their prompt and equal beginnings."""

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
from dapo.model.transfer import to_device
from dapo.policy.sharing import Bundle, Item, bundle, by_prompt
from dapo.types import Group, Rollout

# Trained tokens per input of a micro-batch, at most, once there are more than a few: where responses share most of
# their tokens, the states that predict them take memory that `max_tokens` does not count.
_MOST_TRAINED, _FEW_TOKENS = 4, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A micro-batch: T packed input tokens, R response tokens to learn from.

    A response's last token is never an input. Its first token is predicted by the prompt's last hidden state, which all
    responses to that prompt share. Tokens that an environment gave are inputs, and not among the R. Where responses
    begin alike (the first turns of episodes, say), the equal tokens are computed once: several of the R then have the
    same predictor, each with its own advantage and old log-probability.
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
        Item(
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
    items = [Item(group, i, 0.0, False) for group in groups for i in range(len(group.rollouts))]
    return _packed(items, max_tokens, like, True, rank, ranks)


def _packed(items: list[Item], max_tokens: int, like: Tensor, share: bool, rank: int, ranks: int) -> list[Batch]:
    if not items:
        return []
    shares = _divided(items, max_tokens, share, ranks)
    own = shares[rank] if rank < len(shares) else []
    missing = max(map(len, shares)) - len(own)
    return [_pack(part, like) for part in own] + [_filler(items, like)] * missing


def _divided(items: list[Item], max_tokens: int, share: bool, ranks: int) -> list[list[list[Bundle]]]:
    """Return the micro-batches of each rank, each as its bundles, with the fewest tokens on the busiest rank."""
    found = _shares(bundle(items, share), max_tokens, ranks)
    if not share or sum(map(len, found)) == 1:
        return found
    # Where bundles are cut, sharing prompts only can be better: a prefix is longer than its prompt.
    prompts = [Bundle(0, members) for members in by_prompt(items)]
    return min(found, _shares(prompts, max_tokens, ranks), key=_load)


def _load(shares: list[list[list[Bundle]]]) -> tuple[int, int]:
    """Return the tokens of the busiest rank, and of all ranks."""
    tokens = [sum(each.tokens for part in parts for each in part) for parts in shares]
    return max(tokens), sum(tokens)


def _shares(bundles: list[Bundle], max_tokens: int, ranks: int) -> list[list[list[Bundle]]]:
    shares = [bundles] if ranks == 1 else _split_over_ranks(bundles, ranks)
    return [list(_cut(share, max_tokens)) for share in shares]


def _split_over_ranks(bundles: list[Bundle], ranks: int) -> list[list[Bundle]]:
    """Split bundles into at most one share per rank, with the smallest possible largest share.

    Binary search for the smallest limit at which `_cut` needs no more than `ranks` parts.
    """
    most = sum(each.prefix * len(each.items) + each.tokens for each in bundles)
    limit = bisect_left(range(most), True, key=lambda tokens: sum(1 for _ in _cut(bundles, tokens)) <= ranks)
    return list(_cut(bundles, limit))


def _filler(items: list[Item], like: Tensor) -> Batch:
    """Return a small micro-batch of weight zero, for a rank that has fewer micro-batches than others.

    Forward and backward are collective, so all ranks must run the same number of them.
    """
    smallest = min(items, key=lambda item: item.inputs + len(item.prompt))
    batch = _pack([Bundle(0, [replace(smallest, weight=0.0, is_current=False)])], like)
    # A weight of zero times an advantage that is not finite would be NaN.
    return replace(batch, rollouts=(), advantages_R=torch.zeros_like(batch.advantages_R))


def _cut(bundles: list[Bundle], max_tokens: int) -> Iterator[list[Bundle]]:
    """Cut bundles into parts of at most `max_tokens` inputs. The rest of a bundle computes its prefix again.

    A single rollout that is longer than that is a part of its own.
    """
    most_trained = max(_MOST_TRAINED * max_tokens, _FEW_TOKENS)
    part: list[Bundle] = []
    used = trained = 0
    for each in bundles:
        members: list[Item] = []
        for item in each.items:
            cost = item.inputs - each.shared + (0 if members else each.prefix)
            if used and (used + cost > max_tokens or trained + item.rollout.sampled > most_trained):
                yield part + [replace(each, items=members)] * bool(members)
                part, members, used, trained = [], [], 0, 0
                cost = item.inputs + len(item.prompt)
            members.append(item)
            used, trained = used + cost, trained + item.rollout.sampled
        part.append(replace(each, items=members))
    if part:
        yield part


def _pack(bundles: list[Bundle], like: Tensor) -> Batch:
    """Lay out the bundles one after the other: the prefix, then what follows it in response 1, ..., response n."""
    device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
    items = [item for each in bundles for item in each.items]
    families: list[Family] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    cursor = 0
    for each in bundles:
        start, length, shared = cursor, each.prefix, each.shared
        tokens += [np.array(each.items[0].prompt), each.items[0].rollout.tokens[:shared]]
        positions.append(np.arange(length))
        cursor += length
        responses = []
        for item in each.items:
            rest = item.inputs - shared
            tokens.append(item.rollout.tokens[shared:-1])
            positions.append(np.arange(length, length + rest))
            # Token 0 is predicted by the prompt's last token, token i by token i - 1 of the response: in the prefix, up
            # to the first token that is not shared.
            places = np.arange(start + length - shared - 1, start + length), np.arange(cursor, cursor + rest)
            predictors.append(item.of_own(np.concatenate(places)))
            responses.append((cursor, rest))
            cursor += rest
        families.append(Family((start, length), tuple(responses), shared))

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


def _tensor(parts: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(np.concatenate(parts), dtype, device)


def _per_token(items: list[Item], values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Repeat one value per rollout for each of the model's tokens in it."""
    spread = np.repeat(np.array(values), [item.rollout.sampled for item in items])
    return to_device(spread, dtype, device)
