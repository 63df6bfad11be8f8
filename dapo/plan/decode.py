"""Seconds of sampling: bytes and operations of decode steps, and the long tail in which slots stand empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.model.meter import kv_bytes, matmul_parameters
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

BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Sampler:
    """One copy of the model that samples, on `tensor_parallel` GPUs, with room for so many responses at once."""

    shape: Shape
    gpu: Gpu
    is_vllm: bool
    tensor_parallel: int
    slots: float

    def parts(self, rows: Any, context: Any) -> dict[str, Any]:
        """Seconds of one decode step by what takes them; `context` tokens are cached for each of the rows."""
        shape, gpu, ways = self.shape, self.gpu, self.tensor_parallel
        weights = matmul_parameters(shape) / ways
        read = READING * gpu.bandwidth
        loading = BYTES * weights / read
        multiplying = 2 * rows * weights / (DECODE_PRODUCTS * gpu.flops)
        cached = kv_bytes(shape, BYTES) / min(ways, shape.num_key_value_heads)
        host = shape.num_hidden_layers * LAYER_SECONDS
        if self.is_vllm:
            host = host + VLLM_STEP_SECONDS + VLLM_ROW_SECONDS * rows
        if ways > 1:  # two sums over the GPUs in each layer
            sent = 2 * rows * shape.hidden_size * BYTES / (NETWORK_SHARE * gpu.link)
            host = host + 2 * shape.num_hidden_layers * (ALL_REDUCE_SECONDS + sent)
        return {
            "reading weights": np.where(loading >= multiplying, loading, 0.0),
            "products": np.where(loading < multiplying, multiplying, 0.0),
            "reading keys and values": rows * context * cached / read,
            "fixed cost of a step": host + 0.0 * rows,
        }

    def step_seconds(self, rows: Any, context: Any) -> Any:
        return sum(self.parts(rows, context).values())


@dataclass(frozen=True, slots=True)
class Generation:
    """Of all rounds of a step."""

    full: float  # seconds if all slots were busy all the time
    tail: float  # what is lost because slots stand empty
    driver: float  # what the engines wait for the driver
    limit: str  # what a decode step spends most on while all slots are busy

    @property
    def seconds(self) -> float:
        return self.full + self.tail + self.driver


def generation(sampler: Sampler, work: Workload, engines: int) -> Generation:
    """On so many engines. A group stays on one engine, and a round ends when its last response does."""
    full = tail = driver = 0.0
    for groups in work.rounds:
        busy = min(engines, groups)
        responses = groups * work.n / busy
        rows = min(sampler.slots, responses)
        filled = responses * work.lengths.mean * _busy_step(sampler, work, rows) / rows
        spent = round_seconds(sampler, work.lengths, work.prompt, responses, busy)
        if work.is_inflight:
            # Others fill the slots, but a response must be done `max_staleness` steps after that in which it began; if
            # that is too soon for the longest, it is waited for as in a round.
            among_others = work.lengths.longest_of(groups * work.n) * _busy_step(sampler, work, rows)
            spent = max(filled, min(spent, among_others / (work.max_staleness + 0.5)))
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
    """Of a prompt, which its group shares."""
    rate = TRAIN_PRODUCTS * sampler.gpu.flops * sampler.tensor_parallel
    return 2 * matmul_parameters(sampler.shape) * tokens / rate


def round_seconds(sampler: Sampler, lengths: Lengths, prompt: float, responses: float, engines: float = 1) -> float:
    """Until the last of `responses` (on each of so many engines) is done, on average over their order.

    As long as others wait, every slot is busy. Then slots empty: if all began at once, as responses are longer than
    the step; if slots have long been reused, as what is left of them is, which is the tail's integral. In between,
    both count. The round goes on as long as anyone of all engines' responses does.
    """
    slots = min(sampler.slots, responses)
    reused = min(1.0, (responses - slots) / slots)
    mean, at_K, longer_K, width = lengths.mean, lengths.at_K, lengths.longer_K, lengths.width
    beyond_K = np.cumsum(longer_K[::-1])[::-1] * width  # tokens that responses have past each length
    left_K = (1 - reused) * longer_K + reused * beyond_K / mean
    reached_K = np.cumsum((at_K * longer_K)[::-1])[::-1] * width / np.maximum(beyond_K, 1e-12)
    position_K = (1 - reused) * at_K + reused * np.maximum(reached_K, at_K)
    rows_K = np.maximum(1.0, slots * left_K)
    running_K = any_of(left_K, slots * engines)
    drain = (sampler.step_seconds(rows_K, prompt + position_K) * running_K).sum() * width
    drained_tokens = slots * ((1 - reused) * mean + reused * lengths.mean_age)
    steps = max(0.0, responses * mean - drained_tokens) / slots
    return float(drain + steps * sampler.step_seconds(slots, prompt + lengths.mean_age))
