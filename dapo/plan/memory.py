"""Memory of one GPU while it samples and while it trains, and how many tokens fit beside the fixed parts."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.model.memory import (
    BASE_SHARE,
    CONTEXT_BYTES,
    GIB,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MAX_TOKENS,
    MOMENT_BYTES,
    USABLE,
    Division,
    MicroBatch,
    activation_bytes,
    adapter_parameters,
    cache_room,
    checkpoint_bytes,
    divide,
    kv_bytes,
    micro_batch,
    sampling_bytes,
)
from dapo.plan.decode import BYTES
from dapo.plan.hardware import FRAGMENTATION, Gpu
from dapo.plan.shapes import Shape
from dapo.plan.workload import Workload

_STATE_BYTES = MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES


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
    checkpoint: float  # bytes of a checkpoint on disk
    offloaded: float = 0.0  # bytes of moments in the host's memory, which visit the GPU in each update
    offloaded_base: float = 0.0  # bytes of weights beneath adapters in the host's memory
    offloaded_shard: float = 0.0  # bytes of each learner's masters, gradients and moments, with cluster.offload

    @property
    def peak(self) -> tuple[float, float]:
        sampling, training = zip(*self.parts.values(), strict=True)
        return sum(sampling), sum(training)


def usable(gpu: Gpu) -> float:
    """Return the bytes of a GPU that tensors may take."""
    return USABLE * (gpu.memory - CONTEXT_BYTES)


def memory(config: Config, shape: Shape, gpu: Gpu, layout: Layout, work: Workload) -> Memory:
    """Return the bytes of each part, divided as a run divides them. Raise DoesNotFit if they exceed the memory."""
    state = _state(config, shape, layout)
    is_full, base = config.model.lora.rank == 0, 0.0
    if not is_full and layout.shares_weights:
        base = float(BYTES * shape.num_hidden_layers * shape.layer)  # beside the weights that adapters are merged into
        if base <= BASE_SHARE * (usable(gpu) - state["weights"]):
            state["base weights"], base = base, 0.0
    fixed = sum(size for name, size in state.items() if name not in ("moments", "gradients", "gathered layers"))
    division = Division(lends=True)
    if layout.shares_weights:
        per_token = activation_bytes(shape, BYTES, recompute=config.optim.recompute_activations != "never")
        may_lend = config.rollout.mode == "strict"
        sizes = usable(gpu) - fixed, state["gradients"], state["moments"]
        division = divide(*sizes, per_token, may_lend=may_lend, longest=work.longest)
    offloaded = state["moments"] if division.offloads else 0.0
    state["moments"] -= offloaded
    resting = fixed + state["moments"]
    training = resting + state["gradients"] + state["gathered layers"]
    sampler = 0.0 if layout.shares_weights else BYTES * shape.parameters / layout.tensor_parallel
    beside = sampler + (0.0 if layout.rollout_gpus else fixed + max(state["moments"], division.reserved))
    cache, working, slots = _cache(config, shape, layout, work, gpu, usable(gpu) - beside)
    held = (0.0, 0.0) if division.lends else (cache, working)  # what the sampler keeps during an update
    most = config.update_tokens if layout.shares_weights else MAX_TOKENS
    split = _micro_batch(config, shape, work, usable(gpu) - training - sum(held), gpu, most)
    # At most what a rank gets of one update, but at least the longest response.
    mine = work.trained_groups / work.updates * (work.n * work.lengths.mean + work.prompt) / layout.learners
    held_tokens = max(float(work.longest), min(split.tokens, mine))
    own = ("sampler's weights", "key/value cache", "decoding", "CUDA context")  # of a GPU that only samples
    parts = {
        **{name: (size, size) for name, size in state.items()},
        "gradients": (0.0 if division.lends else state["gradients"], state["gradients"]),
        "gathered layers": (0.0, state["gathered layers"]),
        "sampler's weights": (sampler, 0.0),
        "key/value cache": (cache, held[0]),
        "decoding": (working, held[1]),
        "activations": (0.0, held_tokens * activation_bytes(shape, BYTES, recompute=split.recompute)),
        "logits of a chunk": (0.0, 0.75 * split.head_bytes),  # float32 logits take half of it, their gradient a quarter
        "CUDA context": (float(CONTEXT_BYTES), float(CONTEXT_BYTES)),
    }
    if layout.rollout_gpus:  # the two columns then describe different GPUs
        parts = {name: (s if name in own else 0.0, t) for name, (s, t) in parts.items()}
    sampling, training = (FRAGMENTATION * sum(column) for column in zip(*parts.values(), strict=True))
    parts = {name: pair for name, pair in parts.items() if any(pair)} | {"fragmentation": (sampling, training)}
    return Memory(
        parts, slots, split.tokens, held_tokens, split.recompute,
        checkpoint=checkpoint_bytes(shape.parameters, shape.parameters if is_full else 0, BYTES),
        offloaded=offloaded, offloaded_base=base,
        offloaded_shard=_trained(config, shape, layout) * (BYTES + _STATE_BYTES) if config.cluster.offload else 0.0,
    )  # fmt: skip


def _state(config: Config, shape: Shape, layout: Layout) -> dict[str, float]:
    """Return the learner's state by part. Gradients and gathered layers exist only while it trains."""
    share = shape.parameters / layout.learners
    is_full = config.model.lora.rank == 0
    held = 0.0 if config.cluster.offload else _trained(config, shape, layout)  # offloaded: in the host's memory
    # With FSDP the masters are rounded in place, and what rounding takes from them has the size of the weights.
    working = BYTES * (held if is_full and layout.learners > 1 else share)
    # FSDP gathers embedding and head together, and two layers at a time, each with its float32 gradient.
    largest = 2 * shape.layer + shape.embedding * (1 if shape.tie_word_embeddings else 2)
    return {
        "weights": working,
        "masters": MASTER_BYTES * held,
        "moments": MOMENT_BYTES * held,
        "reference": BYTES * share if config.needs_reference and is_full else 0.0,
        "gradients": GRADIENT_BYTES * held,
        "gathered layers": largest * (BYTES + GRADIENT_BYTES) if layout.learners > 1 else 0.0,
    }


def _trained(config: Config, shape: Shape, layout: Layout) -> float:
    """Return the parameters that each learner trains."""
    rank = config.model.lora.rank
    return (adapter_parameters(shape, rank) if rank > 0 else shape.parameters) / layout.learners


def _cache(
    config: Config, shape: Shape, layout: Layout, work: Workload, gpu: Gpu, free: float
) -> tuple[float, float, float]:
    """Return the bytes of the cache, those of decoding, and how many responses of average progress fit."""
    per_token = kv_bytes(shape, BYTES) / min(layout.tensor_parallel, shape.num_key_value_heads)
    responses = max(work.n, max(work.rounds) * work.n / layout.engines)
    wanted = min(work.concurrent, responses) * work.longest * per_token
    room, working = free, 0
    if not layout.is_vllm:
        rows = config.concurrent
        room, prompts = cache_room(shape, BYTES, free, config.rollout.kv_memory_fraction, rows, work.longest)
        working = sampling_bytes(shape, BYTES, rows, prompts)
    cache = min(wanted, room)
    if free <= 0:
        raise DoesNotFit(
            f"sampling does not fit: weights and training state take {_gib(usable(gpu) - free)}, but a GPU has "
            f"{_gib(usable(gpu))} for them"
        )
    if cache < work.longest * per_token:
        raise DoesNotFit(
            f"sampling does not fit: after {_gib(usable(gpu) - free)} of weights and training state, a GPU has "
            f"room for {max(0.0, cache / per_token):,.0f} cached tokens, but one response may need {work.longest:,}"
        )
    average = work.prompt + work.lengths.mean_age
    return cache, working, min(float(work.concurrent), cache / per_token / average)


def _micro_batch(config: Config, shape: Shape, work: Workload, free: float, gpu: Gpu, most: int) -> MicroBatch:
    """Return the split of an update. A response is never split."""
    given, may = config.optim.max_tokens_per_micro_batch, config.optim.recompute_activations
    kept, recomputed = (activation_bytes(shape, BYTES, recompute=each) for each in (False, True))
    found = micro_batch(
        free, kept, recomputed, given, may_recompute=may != "never", always=may == "always", most=most,
        longest=work.longest,
    )  # fmt: skip
    fits = (free - found.head_bytes) / (recomputed if found.recompute else kept)
    least = max(given, work.longest)
    if fits < least:
        raise DoesNotFit(
            f"training does not fit: after {_gib(usable(gpu) - free + found.head_bytes)} of weights, optimizer "
            f"state and logits, a GPU has room for the activations of {max(0.0, fits):,.0f} tokens, but "
            f"{least:,} are needed"
        )
    return found


def _gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB"
