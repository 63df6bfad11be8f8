"""Bytes on one GPU, while it samples and while it trains, and what they leave room for."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.model.meter import kv_bytes
from dapo.plan.decode import BYTES
from dapo.plan.hardware import GIB, HEAD_BYTES, USABLE, Gpu
from dapo.plan.shapes import Shape
from dapo.plan.workload import Workload

_MOST_TOKENS = 1 << 17  # as the policy's own budget has it
_ENOUGH_TOKENS = 1 << 14
_MASTER, _MOMENTS, _GRADIENT = 4, 8, 4  # bytes of a parameter in float32


class DoesNotFit(ConfigError):
    """A part needs more memory than a GPU has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Who does what on how many GPUs. Colocated: all of them do both, in turns."""

    gpus: int
    rollout_gpus: int  # that only sample; 0: colocated
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
        """The embedded engine samples from the very weights that are trained, where they are whole."""
        return self.gpus == 1 and not self.is_vllm


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, in bytes by part: (while sampling, while training)."""

    parts: dict[str, tuple[float, float]]
    slots: float  # responses that one engine has room for
    micro_tokens: float  # that an update may compute at once
    held_tokens: float  # that it has at once
    recomputes: bool

    @property
    def peak(self) -> tuple[float, float]:
        sampling, training = zip(*self.parts.values(), strict=True)
        return sum(sampling), sum(training)


def memory(config: Config, shape: Shape, gpu: Gpu, layout: Layout, work: Workload) -> Memory:
    """What each part takes; DoesNotFit where that is more than there is."""
    room = USABLE * gpu.memory
    states = _states(config, shape, layout)
    resting = 0.0 if layout.rollout_gpus else sum(bytes_ for bytes_, _ in states.values())
    sampler = 0.0 if layout.shares_weights else BYTES * shape.parameters / layout.tensor_parallel
    cache, slots = _cache(config, shape, layout, work, room - resting - sampler, gpu)
    held = sum(bytes_ for _, bytes_ in states.values())
    tokens, recomputes = _micro_batch(config, shape, work, room - held, gpu)
    # No more than a rank gets of one update, and room for the longest response.
    mine = work.trained_groups / work.updates * (work.n * work.lengths.mean + work.prompt) / layout.learners
    at_once = max(float(work.longest), min(tokens, mine))
    parts = {
        **states,
        "sampler's weights": (sampler, 0.0),
        "key/value cache": (cache, 0.0),
        "activations": (0.0, at_once * activation_bytes(shape, recomputes)),
        "logits of a chunk": (0.0, float(HEAD_BYTES)),
    }
    if layout.rollout_gpus:  # the two columns are then two kinds of GPUs
        parts = {
            name: (s if name in ("sampler's weights", "key/value cache") else 0.0, t) for name, (s, t) in parts.items()
        }
    return Memory({name: pair for name, pair in parts.items() if any(pair)}, slots, tokens, at_once, recomputes)


def _states(config: Config, shape: Shape, layout: Layout) -> dict[str, tuple[float, float]]:
    """What learning keeps, also while the GPU samples; gradients and gathered layers only while it learns."""
    share = shape.parameters / layout.learners
    is_full = config.model.lora.rank == 0
    working = BYTES * share if not is_full or layout.learners == 1 else 0.0  # shards are masters, cast when gathered
    trained = share if is_full and not config.cluster.offload else 0.0  # offloaded they rest in the host's memory
    # FSDP gathers the embeddings with the head, and two layers at a time, each with its gradient in float32.
    wide = 2 * shape.layer + shape.embedding * (1 if shape.tie_word_embeddings else 2)
    gathered = wide * (BYTES + _GRADIENT) if layout.learners > 1 else 0.0
    reference = BYTES * share if config.needs_reference and is_full else 0.0
    states = {
        "weights": (working, working),
        "masters and moments": ((_MASTER + _MOMENTS) * trained,) * 2,
        "reference": (reference, reference),
        "gradients": (0.0, _GRADIENT * trained),
        "gathered layers": (0.0, gathered),
    }
    return {name: pair for name, pair in states.items() if any(pair)}


def _cache(config: Config, shape: Shape, layout: Layout, work: Workload, free: float, gpu: Gpu) -> tuple[float, float]:
    """The bytes of the cache, and the responses that it has room for as far as they are on average."""
    per_token = kv_bytes(shape, BYTES) / min(layout.tensor_parallel, shape.num_key_value_heads)
    share = 1.0 if layout.is_vllm else config.rollout.kv_memory_fraction
    responses = max(work.n, max(work.rounds) * work.n / layout.engines)
    wanted = min(work.concurrent, responses) * work.longest * per_token
    cache = min(wanted, share * free)
    if cache < work.longest * per_token:
        raise DoesNotFit(
            f"sampling does not fit: beside {_gib(USABLE * gpu.memory - free)} of weights and training state there is "
            f"room for {max(0.0, cache / per_token):,.0f} cached tokens on a GPU, and one response may need "
            f"{work.longest:,}"
        )
    average = work.prompt + work.lengths.mean_age
    return cache, min(float(work.concurrent), cache / per_token / average)


def _micro_batch(config: Config, shape: Shape, work: Workload, free: float, gpu: Gpu) -> tuple[float, bool]:
    """The tokens there is room for, and whether they are computed twice. A response is never cut in two."""
    given, may = config.optim.max_tokens_per_micro_batch, config.optim.recompute_activations
    fits = {recompute: (free - HEAD_BYTES) / activation_bytes(shape, recompute) for recompute in (False, True)}
    least = max(given, work.longest)
    recompute = may == "always" or (may == "auto" and fits[False] < (least if given else max(least, _ENOUGH_TOKENS)))
    if fits[recompute] < least:
        raise DoesNotFit(
            f"training does not fit: beside {_gib(USABLE * gpu.memory - free + HEAD_BYTES)} of weights, optimizer "
            f"state and logits there is room for the activations of {max(0.0, fits[recompute]):,.0f} tokens at once, "
            f"and {least:,} are needed"
        )
    return float(given or min(_MOST_TOKENS, fits[recompute])), recompute


def activation_bytes(shape: Shape, recompute: bool) -> float:
    """Held per token between forward and backward, counted as the policy's own budget counts it."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    saved = 8 * width + BYTES * (2 * width + 2 * queries + 6 * keys + 2 * inner)
    passing = BYTES * (6 * inner + 2 * queries + 8 * width)
    layers = shape.num_hidden_layers
    return layers * (4 + BYTES) * width + saved + passing if recompute else layers * saved + passing


def _gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB"
