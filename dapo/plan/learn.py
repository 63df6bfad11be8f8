"""Seconds of learning: FLOPs, FSDP's traffic on the network, and the host's time to launch kernels."""

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

_WIRE_GRADIENT = 4  # bytes per gradient value on the network: reduced in float32


@dataclass(frozen=True, slots=True)
class Learner:
    """FSDP ranks, each with micro-batches of `micro_tokens`. `recomputes`: the forward pass is computed twice."""

    shape: Shape
    gpu: Gpu
    ranks: int
    micro_tokens: float
    recomputes: bool
    offloads: bool = False
    moment_bytes: float = 0.0  # of moments that come from the host's memory and return to it, without FSDP


@dataclass(frozen=True, slots=True)
class Learning:
    """All updates of one step: seconds, the resource they are bound by, and model FLOPs utilization."""

    seconds: float
    limit: str
    mfu: float


def update(learner: Learner, work: Workload) -> Learning:
    """Estimate all updates of one step. A response is never split, so the rank with the longest is a lower bound."""
    groups = work.trained_groups / work.updates
    responses = groups * work.n
    operations, tokens = _load(learner.shape, work, responses, min(responses, max(groups, learner.ranks)))
    busiest = _longest_load(learner.shape, work, responses)
    mine, my_tokens = max((operations / learner.ranks, tokens / learner.ranks), busiest)
    micros = math.ceil(my_tokens / learner.micro_tokens)
    layers = learner.shape.num_hidden_layers
    parts = {
        "compute": device_seconds(learner, mine, my_tokens),
        "the network": micros * collective_seconds(learner.gpu, learner.ranks, *exchange_size(learner.shape)),
        "the host": micros * layers * (CAPTURED_LAYER_SECONDS if learner.ranks == 1 else EAGER_LAYER_SECONDS),
    }
    if learner.offloads:  # shards come from the host's memory and gradients return to it; the optimizer runs there
        share = learner.shape.parameters / learner.ranks
        parts["the host's memory"] = share * (
            micros * 2 * _WIRE_GRADIENT / HOST_LINK + OPTIMIZER_BYTES / HOST_BANDWIDTH
        )
    limit = max(parts, key=lambda name: parts[name])
    slowest = max(parts.values())  # the parts overlap, so only the slowest counts
    if limit == "compute" and mine == busiest[0] and learner.ranks > 1:
        limit = "the longest response"
    slowest += learner.moment_bytes / HOST_LINK  # in both directions at once, after the last micro-batch
    mfu = operations / learner.ranks / slowest / learner.gpu.flops
    return Learning(slowest * work.updates * work.epochs, limit, mfu)


def exchange_size(shape: Shape) -> tuple[float, int]:
    """Return the bytes and messages per micro-batch: weights gathered forward and backward, gradients scattered."""
    return shape.parameters * (2 * BYTES + _WIRE_GRADIENT), 3 * (shape.num_hidden_layers + 1)


def forward_seconds(learner: Learner, work: Workload, groups: float) -> float:
    """Return the seconds to compute log-probabilities of these groups: one forward pass, a third of an update."""
    operations, tokens = _load(learner.shape, work, groups * work.n, groups)
    gathering = collective_seconds(
        learner.gpu, learner.ranks, BYTES * learner.shape.parameters, learner.shape.num_hidden_layers + 1
    )
    my_tokens = tokens / learner.ranks
    once = replace(learner, recomputes=False)
    computing = device_seconds(once, operations / learner.ranks / 3, my_tokens / 3)
    return max(computing, math.ceil(my_tokens / learner.micro_tokens) * gathering)


def device_seconds(learner: Learner, operations: float, tokens: float) -> float:
    """Return the seconds on the GPU: matrix products at their share of the peak, plus other memory traffic."""
    shape, gpu = learner.shape, learner.gpu
    traffic = TRAIN_TRAFFIC * tokens * shape.num_hidden_layers * shape.hidden_size
    once = operations / (TRAIN_PRODUCTS * gpu.flops) + traffic / gpu.bandwidth
    return once * (4 / 3 if learner.recomputes else 1)  # a second forward pass; backward costs two


def _load(shape: Shape, work: Workload, responses: float, prompts: float) -> tuple[float, float]:
    """Return the FLOPs and tokens of these numbers of average responses and computed prompts."""
    mean, square, prompt = work.lengths.mean, work.lengths.mean_square, work.prompt
    # Attention pairs: causal within a response, each response token with the whole prompt, causal within a prompt.
    pairs = responses * (square / 2 + prompt * mean) + prompts * prompt**2 / 2
    tokens = responses * mean + prompts * prompt
    return training_operations(shape, tokens, responses * mean, pairs), tokens


def _longest_load(shape: Shape, work: Workload, responses: float) -> tuple[float, float]:
    """Return the FLOPs and tokens of the longest of this number of responses, with its prompt."""
    length = work.lengths.longest_of(responses)
    tokens = work.prompt + length
    return training_operations(shape, tokens, length, tokens**2 / 2), tokens


def training_operations(shape: Shape, tokens: float, predicted: float, pairs: float) -> float:
    """Return the FLOPs of forward and backward from averages. `dapo.model.meter.training_flops` counts exactly.

    tokens: computed; predicted: with logits; pairs: of a query and a key.
    """
    products = shape.num_hidden_layers * shape.layer * tokens + shape.embedding * predicted
    attention = 2 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * pairs
    return 6.0 * (products + attention)
