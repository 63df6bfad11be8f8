"""Seconds of sampling: the bytes and FLOPs of decode steps, and the tail of a round in which slots are empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.model.memory import kv_bytes
from dapo.model.meter import matmul_parameters
from dapo.plan.hardware import (
    ALL_REDUCE_SECONDS,
    CONTROLLER_GROUPS,
    DECODE_PRODUCTS,
    LAYER_SECONDS,
    NETWORK_SHARE,
    READING,
    TRAIN_PRODUCTS,
    VLLM_ROW_SECONDS,
    VLLM_STEP_SECONDS,
    Gpu,
)
from dapo.plan.shapes import Shape
from dapo.plan.workload import Lengths, Workload, any_of

BYTES = 2  # per bfloat16 value


@dataclass(frozen=True, slots=True)
class Sampler:
    """One engine on `tensor_parallel` GPUs, whose cache has room for `slots` responses at once."""

    shape: Shape
    gpu: Gpu
    is_vllm: bool
    tensor_parallel: int
    slots: float

    def parts(self, rows: Any, context: Any) -> dict[str, Any]:
        """Return the seconds of one decode step by cause. `rows` responses have `context` cached tokens each."""
        shape, gpu, ways = self.shape, self.gpu, self.tensor_parallel
        weights = matmul_parameters(shape) / ways
        read = READING * gpu.bandwidth
        # Reading the weights and multiplying by them overlap, so only the slower of the two counts.
        loading = BYTES * weights / read
        multiplying = 2 * rows * weights / (DECODE_PRODUCTS * gpu.flops)
        cached = kv_bytes(shape, BYTES) / min(ways, shape.num_key_value_heads)
        host = shape.num_hidden_layers * LAYER_SECONDS
        if self.is_vllm:
            host = host + VLLM_STEP_SECONDS + VLLM_ROW_SECONDS * rows
        if ways > 1:  # two all-reduces per layer
            sent = 2 * rows * shape.hidden_size * BYTES / (NETWORK_SHARE * gpu.link)
            host = host + 2 * shape.num_hidden_layers * (ALL_REDUCE_SECONDS + sent)
        return {
            "reading weights": np.where(loading >= multiplying, loading, 0.0),
            "compute": np.where(loading < multiplying, multiplying, 0.0),
            "reading keys and values": rows * context * cached / read,
            "fixed cost of a step": host + 0.0 * rows,  # broadcast to the shape of `rows`
        }

    def step_seconds(self, rows: Any, context: Any) -> Any:
        return sum(self.parts(rows, context).values())


@dataclass(frozen=True, slots=True)
class Generation:
    """Seconds of sampling in one step, over all its rounds."""

    full: float  # as if all slots were always busy
    tail: float  # lost to empty slots
    driver: float  # engines waiting for the driver
    limit: str  # the largest cost of a decode step while all slots are busy

    @property
    def seconds(self) -> float:
        return self.full + self.tail + self.driver


def generation(sampler: Sampler, work: Workload, engines: int) -> Generation:
    """Return the seconds on this many engines. A group stays on one engine; a round ends with its last response."""
    full = tail = driver = 0.0
    for groups in work.rounds:
        busy = min(engines, groups)
        responses = groups * work.n / busy
        rows = min(sampler.slots, responses)
        filled = responses * work.lengths.mean * _busy_step(sampler, work, rows) / rows
        spent = round_seconds(sampler, work.lengths, work.prompt, responses, busy)
        if work.is_inflight:
            # Other responses fill the slots, so there is no tail, with one exception: a response must finish within
            # `max_staleness` steps after the one in which it began (half a step in, on average). If the longest takes
            # longer, the step waits for it, at most as long as a round would.
            longest_at_full_load = work.lengths.longest_of(groups * work.n) * _busy_step(sampler, work, rows)
            spent = max(filled, min(spent, longest_at_full_load / (work.max_staleness + 0.5)))
        prefill = prefill_seconds(sampler, work.prompt) * groups / busy
        full += min(filled, spent) + prefill
        tail += max(0.0, spent - filled)
        driver += max(0.0, groups / CONTROLLER_GROUPS - spent - prefill) if engines > 1 else 0.0
    rows = min(sampler.slots, work.rounds[0] * work.n / min(engines, work.rounds[0]))
    parts = sampler.parts(rows, work.prompt + work.lengths.mean_age)
    return Generation(full, tail, driver, max(parts, key=lambda name: float(parts[name])))


def _busy_step(sampler: Sampler, work: Workload, rows: float) -> float:
    return float(sampler.step_seconds(rows, work.prompt + work.lengths.mean_age))


def prefill_seconds(sampler: Sampler, tokens: float) -> float:
    """Return the seconds to prefill one prompt of `tokens`, which its group shares."""
    rate = TRAIN_PRODUCTS * sampler.gpu.flops * sampler.tensor_parallel
    return 2 * matmul_parameters(sampler.shape) * tokens / rate


def round_seconds(sampler: Sampler, lengths: Lengths, prompt: float, responses: float, engines: float = 1) -> float:
    """Return the expected seconds until every engine has finished its `responses`.

    While responses wait for a slot, all slots are busy. Then the slots drain. How fast depends on their history:
    - If all responses began together (reused = 0), the share still running after k tokens is P(length > k).
    - If slots have been reused many times (reused = 1), the running responses are at random points of their life.
      Renewal theory gives their remaining length: P(remaining > k) = integral of P(length > x) over x > k, / mean.
    In between, the two are mixed. The round lasts as long as any response of any engine runs. Suffix _K: one value per
    length of the grid of `Lengths`.
    """
    slots = min(sampler.slots, responses)
    reused = min(1.0, (responses - slots) / slots)
    mean, at_K, longer_K, width = lengths.mean, lengths.at_K, lengths.longer_K, lengths.width
    beyond_K = np.cumsum(longer_K[::-1])[::-1] * width  # expected tokens of a response beyond each length
    left_K = (1 - reused) * longer_K + reused * beyond_K / mean
    # Tokens generated so far by the responses that still run after k drain steps.
    reached_K = np.cumsum((at_K * longer_K)[::-1])[::-1] * width / np.maximum(beyond_K, 1e-12)
    position_K = (1 - reused) * at_K + reused * np.maximum(reached_K, at_K)
    rows_K = np.maximum(1.0, slots * left_K)
    running_K = any_of(left_K, slots * engines)
    drain = (sampler.step_seconds(rows_K, prompt + position_K) * running_K).sum() * width
    # The tokens not generated while draining were generated before, with all slots busy.
    drained_tokens = slots * ((1 - reused) * mean + reused * lengths.mean_age)
    steps = max(0.0, responses * mean - drained_tokens) / slots
    return float(drain + steps * sampler.step_seconds(slots, prompt + lengths.mean_age))
