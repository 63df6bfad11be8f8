"""Build the policy that learns from a configuration: its model, adapters and reference; whole, or one rank's shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo.config import Config, ModelConfig
from dapo.model.forward import check_model
from dapo.model.loading import LoadedModel, load_model, load_tokenizer, resolve_dtype
from dapo.model.lora import add_adapters, causal_lm
from dapo.policy.policy import Policy
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.sharding import emptied, rank_device


def model_source(config: Config, saved: Path | None) -> ModelConfig:
    """Where a run's weights come from. Adapters lie on the weights that they were trained on, not on a merged model."""
    if saved is None or config.model.lora.rank > 0:
        return config.model
    return config.model.model_copy(update={"path": str(saved)})


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
