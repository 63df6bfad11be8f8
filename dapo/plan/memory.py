"""Memory of one GPU while it samples and while it trains, and how many tokens fit beside the fixed parts."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.model.memory import (
    ENOUGH_TOKENS,
    GIB,
    GRADIENT_BYTES,
    HEAD_BYTES,
    MASTER_BYTES,
    MAX_TOKENS,
    MOMENT_BYTES,
    activation_bytes,
    kv_bytes,
)
from dapo.plan.decode import BYTES
from dapo.plan.hardware import USABLE, Gpu
from dapo.plan.shapes import Shape
from dapo.plan.workload import Workload


class DoesNotFit(ConfigError):
    """The recipe needs more memory than a GPU has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of GPUs into learners and engines. Colocated: every GPU does both, in turns."""

    gpus: int
    rollout_gpus: int  # GPUs that only sample; 0: colocated
    tensor_parallel: int
    is_vllm: bool

    @property
    def learners(self) -> int:
        return self.gpus - self.rollout_gpus

    @property
    def engines(self) -> int:
        return (self.rollout_gpus or self.gpus) // self.tensor_parallel

    @property
    def shares_weights(self) -> bool:
        """Whether the engine samples from the weights being trained: the embedded engine, if they are not sharded."""
        return self.gpus == 1 and not self.is_vllm


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU: bytes by part, as (while sampling, while training)."""

    parts: dict[str, tuple[float, float]]
    slots: float  # responses that fit into the cache of one engine
    micro_tokens: float  # most tokens of a micro-batch
    held_tokens: float  # tokens of the largest micro-batch that the recipe produces
    recomputes: bool  # activations are computed twice instead of being kept

    @property
    def peak(self) -> tuple[float, float]:
        sampling, training = zip(*self.parts.values(), strict=True)
        return sum(sampling), sum(training)


def memory(config: Config, shape: Shape, gpu: Gpu, layout: Layout, work: Workload) -> Memory:
    """Return the bytes of each part. Raise DoesNotFit if they exceed the GPU's memory."""
    room = USABLE * gpu.memory
    states = _states(config, shape, layout)
    resting = 0.0 if layout.rollout_gpus else sum(bytes_ for bytes_, _ in states.values())
    sampler = 0.0 if layout.shares_weights else BYTES * shape.parameters / layout.tensor_parallel
    cache, slots = _cache(config, shape, layout, work, room - resting - sampler, gpu)
    held = sum(bytes_ for _, bytes_ in states.values())
    tokens, recomputes = _micro_batch(config, shape, work, room - held, gpu)
    # At most what a rank gets of one update, but at least the longest response.
    mine = work.trained_groups / work.updates * (work.n * work.lengths.mean + work.prompt) / layout.learners
    held_tokens = max(float(work.longest), min(tokens, mine))
    parts = {
        **states,
        "sampler's weights": (sampler, 0.0),
        "key/value cache": (cache, 0.0),
        "activations": (0.0, held_tokens * activation_bytes(shape, BYTES, recompute=recomputes)),
        "logits of a chunk": (0.0, float(HEAD_BYTES)),
    }
    if layout.rollout_gpus:  # the two columns then describe different GPUs
        parts = {
            name: (s if name in ("sampler's weights", "key/value cache") else 0.0, t) for name, (s, t) in parts.items()
        }
    return Memory({name: pair for name, pair in parts.items() if any(pair)}, slots, tokens, held_tokens, recomputes)


def _states(config: Config, shape: Shape, layout: Layout) -> dict[str, tuple[float, float]]:
    """Return the learner's state by part. Gradients and gathered layers exist only while it trains."""
    share = shape.parameters / layout.learners
    is_full = config.model.lora.rank == 0
    working = (
        BYTES * share if not is_full or layout.learners == 1 else 0.0
    )  # with FSDP the masters are cast when gathered
    trained = share if is_full and not config.cluster.offload else 0.0  # offloaded: in the host's memory
    # FSDP gathers embedding and head together, and two layers at a time, each with its float32 gradient.
    largest = 2 * shape.layer + shape.embedding * (1 if shape.tie_word_embeddings else 2)
    gathered = largest * (BYTES + GRADIENT_BYTES) if layout.learners > 1 else 0.0
    reference = BYTES * share if config.needs_reference and is_full else 0.0
    states = {
        "weights": (working, working),
        "masters and moments": ((MASTER_BYTES + MOMENT_BYTES) * trained,) * 2,
        "reference": (reference, reference),
        "gradients": (0.0, GRADIENT_BYTES * trained),
        "gathered layers": (0.0, gathered),
    }
    return {name: pair for name, pair in states.items() if any(pair)}


def _cache(config: Config, shape: Shape, layout: Layout, work: Workload, free: float, gpu: Gpu) -> tuple[float, float]:
    """Return the bytes of the cache, and how many responses of average progress fit into it."""
    per_token = kv_bytes(shape, BYTES) / min(layout.tensor_parallel, shape.num_key_value_heads)
    share = 1.0 if layout.is_vllm else config.rollout.kv_memory_fraction
    responses = max(work.n, max(work.rounds) * work.n / layout.engines)
    wanted = min(work.concurrent, responses) * work.longest * per_token
    cache = min(wanted, share * free)
    if cache < work.longest * per_token:
        raise DoesNotFit(
            f"sampling does not fit: after {_gib(USABLE * gpu.memory - free)} of weights and training state, a GPU has "
            f"room for {max(0.0, cache / per_token):,.0f} cached tokens, but one response may need {work.longest:,}"
        )
    average = work.prompt + work.lengths.mean_age
    return cache, min(float(work.concurrent), cache / per_token / average)


def _micro_batch(config: Config, shape: Shape, work: Workload, free: float, gpu: Gpu) -> tuple[float, bool]:
    """Return the most tokens of a micro-batch, and whether activations are recomputed. A response is never split."""
    given, may = config.optim.max_tokens_per_micro_batch, config.optim.recompute_activations
    fits = {
        recompute: (free - HEAD_BYTES) / activation_bytes(shape, BYTES, recompute=recompute)
        for recompute in (False, True)
    }
    least = max(given, work.longest)
    recompute = may == "always" or (may == "auto" and fits[False] < (least if given else max(least, ENOUGH_TOKENS)))
    if fits[recompute] < least:
        raise DoesNotFit(
            f"training does not fit: after {_gib(USABLE * gpu.memory - free + HEAD_BYTES)} of weights, optimizer "
            f"state and logits, a GPU has room for the activations of {max(0.0, fits[recompute]):,.0f} tokens, but "
            f"{least:,} are needed"
        )
    return float(given or min(MAX_TOKENS, fits[recompute])), recompute


def _gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB"
