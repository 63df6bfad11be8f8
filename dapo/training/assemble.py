"""The parts of a run that hold weights: the policy that learns, the engine that samples, and what both know of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from dapo.cluster import ranks
from dapo.cluster.joining import check_room, join, needs_ray, prepare, starts_here
from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.protocol import Engine
from dapo.errors import LearnerLost
from dapo.model.cache import progress
from dapo.model.forward import check_model
from dapo.model.loading import LoadedModel, load_model, load_tokenizer, resolve_dtype, resolve_path
from dapo.model.lora import add_adapters, causal_lm
from dapo.policy.policy import Policy
from dapo.policy.protocol import Learner
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.sharding import emptied, rank_device
from dapo.rewards.protocol import Judge

if TYPE_CHECKING:
    from dapo.engine.vllm.engine import VllmEngine


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
    judge: Judge | None = None  # where judging is placed elsewhere, too


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
        prepare()  # before anything imports Ray
        check_room(config)
        if config.uses_vllm:
            _check_placed_vllm(config, saved)
        has_joined = join()
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
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _build_shared(config, saved)
    loaded = load_model(model_source(config, saved))
    reference = load_model(config.model).model.requires_grad_(False) if _needs_second_model(config) else None
    return loaded, Policy(_to_train(loaded.model, config), config, reference)


def _build_shared(config: Config, saved: Path | None) -> tuple[LoadedModel, ShardedPolicy]:
    """The model that is returned has no weights: it is what a whole copy of the policy's can be made of."""
    device = rank_device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Shards are cut from weights in CPU memory, so that no GPU need ever hold all of them.
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    place = {"dtype": dtype, "device": "cpu"}
    loaded = _load_once(model_source(config, saved).model_copy(update=place))
    blank = emptied(loaded.model, "meta")
    policy = ShardedPolicy(_to_train(loaded.model, config), config, device=device)
    if _needs_second_model(config):  # read when the first one is no longer whole anywhere
        policy.hold_to(_load_once(config.model.model_copy(update=place)).model.requires_grad_(False))
    return replace(loaded, model=blank), policy


def _load_once(source: ModelConfig) -> LoadedModel:
    """Rank 0 reads the weights. The others wait for it, and get its model without them."""
    loaded = load_model(source) if dist.get_rank() == 0 else None
    box: list[Any] = [loaded and (emptied(loaded.model, "meta"), loaded.stop_ids)]
    dist.broadcast_object_list(box)
    if loaded is not None:
        return loaded
    model, stop_ids = box[0]
    return LoadedModel(model, load_tokenizer(source.path), stop_ids)


def _needs_second_model(config: Config) -> bool:
    """Adapters can be switched off instead."""
    return config.needs_reference and config.model.lora.rank == 0


def _to_train(model: Any, config: Config) -> Any:
    torch.manual_seed(config.run.seed)  # adapters start from random numbers; nothing else draws from it
    ready = add_adapters(model, config.model.lora) if config.model.lora.rank > 0 else model
    if causal_lm(ready).device.type != "meta":  # the other ranks have nothing to compute with
        check_model(causal_lm(ready), config.data.max_prompt_length + config.data.max_response_length)
    return ready


def _check_vllm(config: Config, saved: Path | None) -> None:
    """What can be told before any weights are read."""
    from dapo.engine.vllm.engine import check_vllm  # vLLM is an extra

    check_vllm(config, resolve_path(model_source(config, saved).path))


def _check_placed_vllm(config: Config, saved: Path | None) -> None:
    """The same for workers on Ray, as far as one could live here: another machine's GPUs cannot be asked for."""
    from dapo.engine.vllm.engine import check_vllm, require_vllm

    require_vllm()
    gpus, device = torch.cuda.device_count(), config.model.device
    if device == "cpu" or gpus >= config.rollout.tensor_parallel or (starts_here() and device == "auto"):
        with progress("Asking vLLM about the model"):
            check_vllm(config, resolve_path(model_source(config, saved).path), transport="memory")


def _vllm(config: Config, saved: Path | None, loaded: LoadedModel, policy: Learner) -> VllmEngine:
    from dapo.engine.vllm.engine import open_vllm

    directory = resolve_path(model_source(config, saved).path)
    return open_vllm(config, directory, loaded.tokenizer, loaded.stop_ids, policy.weights)
