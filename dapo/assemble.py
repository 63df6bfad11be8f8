"""The parts of a run that hold weights: the policy that learns, the engine that samples, and what both know of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from dapo.cluster import ranks
from dapo.cluster.joining import join, needs_ray
from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.protocol import Engine
from dapo.errors import LearnerLost
from dapo.model.forward import check_model
from dapo.model.loading import LoadedModel, load_model, resolve_device, resolve_dtype, resolve_path
from dapo.model.lora import add_adapters, causal_lm
from dapo.policy.policy import Policy
from dapo.policy.protocol import Learner
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.sharding import rank_device

if TYPE_CHECKING:
    from dapo.engine.vllm import VllmEngine


def _nothing() -> None: ...


def _give_up(lost: LearnerLost, saved: Path | None) -> None:
    raise lost


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    policy: Learner
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    cache_bytes: int = 0  # that the engine's cache holds on the GPU of the policy
    release_cache: Callable[[], None] = _nothing  # gives them back until something is sampled again
    restart: Callable[[LearnerLost, Path | None], None] = _give_up  # the policy anew, from a checkpoint or the start


def assemble(
    config: Config,
    saved: Path | None = None,
    on_event: Callable[[str, str], None] = lambda kind, message: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Parts:
    """As the configuration says; weights from the checkpoint `saved` where there is one.

    Parts that live elsewhere tell what happens to them by `on_event(kind, message)`, and while they wait for something
    they ask whether the run is to stop.
    """
    if needs_ray(config):
        has_joined = join()  # before anything imports Ray
        from dapo.cluster.place import place

        return place(config, saved, has_joined, on_event, is_stopping)
    if (channel := ranks.channel()) is not None:
        from dapo.cluster.member import assemble_ranks

        return assemble_ranks(config, saved, channel)
    if config.rollout.engine == "vllm":
        _check_vllm(config, saved)
    loaded, policy = build_policy(config, saved)
    if config.rollout.engine == "vllm":
        engine = _vllm(config, saved, loaded, policy)
    else:
        engine = embedded_engine(config, loaded, policy.causal_lm, reserved=policy.optimiser.bytes_to_come)
    if config.rollout.mode == "strict":  # in flight the cache is never empty
        policy.cache_bytes = engine.cache_bytes
    return Parts(policy, engine, loaded.tokenizer, loaded.stop_ids, engine.cache_bytes, engine.release_cache)


def model_source(config: Config, saved: Path | None) -> ModelConfig:
    """Where a run's weights come from. Adapters lie on the weights that they were trained on, not on a merged model."""
    if saved is None or config.model.lora.rank > 0:
        return config.model
    return config.model.model_copy(update={"path": str(saved)})


def embedded_engine(config: Config, loaded: LoadedModel, model: torch.nn.Module, reserved: int = 0) -> EmbeddedEngine:
    """Samples from `model`; `reserved` bytes of its device are for others."""
    on_gpu = loaded.model.device.type == "cuda"
    return EmbeddedEngine(
        model,
        loaded.tokenizer,
        loaded.stop_ids,
        config.run.seed,
        config.concurrent if on_gpu else config.rollout.max_concurrent,
        max_length=config.data.max_prompt_length + config.data.max_response_length,
        kv_memory_fraction=config.rollout.kv_memory_fraction,
        reserved=reserved,
    )


def build_policy(config: Config, saved: Path | None = None) -> tuple[LoadedModel, Policy]:
    """The policy, with its model. Where this process is one of several of torch.distributed, its part of the policy."""
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    device = rank_device(config.model.device) if is_shared else resolve_device(config.model.device)
    # Shards are cut from weights in CPU memory, so that no GPU need ever hold all of them.
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    place = {"dtype": dtype, "device": "cpu"} if is_shared else {}
    loaded = load_model(model_source(config, saved).model_copy(update=place))
    uses_adapters = config.model.lora.rank > 0
    reference = None
    if config.needs_reference and not uses_adapters:
        reference = load_model(config.model.model_copy(update=place)).model.requires_grad_(False)
    torch.manual_seed(config.run.seed)  # adapters start from random numbers; nothing else draws from it
    model = add_adapters(loaded.model, config.model.lora) if uses_adapters else loaded.model
    if not is_shared or dist.get_rank() == 0:
        check_model(causal_lm(model), config.data.max_prompt_length + config.data.max_response_length)
    if not is_shared:
        return loaded, Policy(model, config, reference)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return loaded, ShardedPolicy(model, config, reference, device)


def _check_vllm(config: Config, saved: Path | None) -> None:
    """What can be told before any weights are read."""
    from dapo.engine.vllm import check_vllm  # vLLM is an extra

    check_vllm(config, resolve_path(model_source(config, saved).path))


def _vllm(config: Config, saved: Path | None, loaded: LoadedModel, policy: Learner) -> VllmEngine:
    from dapo.engine.vllm import open_vllm

    directory = resolve_path(model_source(config, saved).path)
    return open_vllm(config, directory, loaded.tokenizer, loaded.stop_ids, policy.weights)
