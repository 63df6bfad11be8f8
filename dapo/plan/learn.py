"""Seconds of learning: operations, what FSDP sends over the network, and what the host needs to issue it all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dapo.plan.decode import BYTES
from dapo.plan.hardware import (
    CAPTURED_LAYER_SECONDS,
    EAGER_LAYER_SECONDS,
    HOST_BANDWIDTH,
    HOST_LINK,
    OPTIMIZER_BYTES,
    TRAIN_PRODUCTS,
    TRAIN_TRAFFIC,
    Gpu,
    collective_seconds,
)
from dapo.plan.shapes import Shape
from dapo.plan.workload import Workload

_REDUCED = 4  # bytes of a gradient on the wire


@dataclass(frozen=True, slots=True)
class Learner:
    """Ranks that share the weights; each computes so many tokens at once, twice where activations are not kept."""

    shape: Shape
    gpu: Gpu
    ranks: int
    micro_tokens: float
    recomputes: bool
    offloads: bool = False


@dataclass(frozen=True, slots=True)
class Learning:
    seconds: float
    limit: str
    mfu: float


def update(learner: Learner, work: Workload) -> Learning:
    """All optimizer steps of one trainer step. A response is computed by one rank, so the longest is a lower bound."""
    groups = work.trained_groups / work.updates
    responses = groups * work.n
    operations, tokens = _load(learner.shape, work, responses, min(responses, max(groups, learner.ranks)))
    busiest = _longest_load(learner.shape, work, responses)
    mine, my_tokens = max((operations / learner.ranks, tokens / learner.ranks), busiest)
    micros = math.ceil(my_tokens / learner.micro_tokens)
    layers = learner.shape.num_hidden_layers
    parts = {
        "products": device_seconds(learner, mine, my_tokens),
        "the network": micros * collective_seconds(learner.gpu, learner.ranks, *exchanged(learner.shape)),
        "the host": micros * layers * (CAPTURED_LAYER_SECONDS if learner.ranks == 1 else EAGER_LAYER_SECONDS),
    }
    if learner.offloads:  # shards come from the host's memory and gradients go there, where the optimizer works
        share = learner.shape.parameters / learner.ranks
        parts["the host's memory"] = share * (micros * 2 * _REDUCED / HOST_LINK + OPTIMIZER_BYTES / HOST_BANDWIDTH)
    limit = max(parts, key=lambda name: parts[name])
    longest = max(parts.values())  # they go on side by side
    if limit == "products" and mine == busiest[0] and learner.ranks > 1:
        limit = "the longest response"
    mfu = operations / learner.ranks / longest / learner.gpu.flops
    return Learning(longest * work.updates * work.epochs, limit, mfu)


def exchanged(shape: Shape) -> tuple[float, int]:
    """Bytes and messages of a micro-batch: weights gathered forward and backward, gradients scattered."""
    return shape.parameters * (2 * BYTES + _REDUCED), 3 * (shape.num_hidden_layers + 1)


def forward_seconds(learner: Learner, work: Workload, groups: float) -> float:
    """Of log-probabilities under other weights, for so many groups at once."""
    operations, tokens = _load(learner.shape, work, groups * work.n, groups)
    gathering = collective_seconds(
        learner.gpu, learner.ranks, BYTES * learner.shape.parameters, learner.shape.num_hidden_layers + 1
    )
    my_tokens = tokens / learner.ranks
    once = replace(learner, recomputes=False)
    computing = device_seconds(once, operations / learner.ranks / 3, my_tokens / 3)
    return max(computing, math.ceil(my_tokens / learner.micro_tokens) * gathering)


def device_seconds(learner: Learner, operations: float, tokens: float) -> float:
    """Products at their share of the peak, and what else each token moves through memory."""
    shape, gpu = learner.shape, learner.gpu
    traffic = TRAIN_TRAFFIC * tokens * shape.num_hidden_layers * shape.hidden_size
    once = operations / (TRAIN_PRODUCTS * gpu.flops) + traffic / gpu.bandwidth
    return once * (4 / 3 if learner.recomputes else 1)  # a second forward pass beside one forward and two backward


def _load(shape: Shape, work: Workload, responses: float, prompts: float) -> tuple[float, float]:
    """Operations and tokens of so many average responses, with prompts that were computed this often."""
    mean, square, prompt = work.lengths.mean, work.lengths.mean_square, work.prompt
    pairs = responses * (square / 2 + prompt * mean) + prompts * prompt**2 / 2
    tokens = responses * mean + prompts * prompt
    return training_operations(shape, tokens, responses * mean, pairs), tokens


def _longest_load(shape: Shape, work: Workload, responses: float) -> tuple[float, float]:
    length = work.lengths.longest_of(responses)
    tokens = work.prompt + length
    return training_operations(shape, tokens, length, tokens**2 / 2), tokens


def training_operations(shape: Shape, tokens: float, predicted: float, pairs: float) -> float:
    """Forward and backward on average figures; `dapo.model.meter.training_flops` counts single sequences."""
    products = shape.num_hidden_layers * shape.layer * tokens + shape.embedding * predicted
    attention = 2 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * pairs
    return 6.0 * (products + attention)
