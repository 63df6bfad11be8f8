"""Build a policy from a configuration, with its model, adapters and reference: whole, or one rank's shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo.config import Config, ModelConfig
from dapo.config.functions import CustomParts
from dapo.model.forward import check_model
from dapo.model.loading import LoadedModel, load_model, load_tokenizer, resolve_dtype
from dapo.model.lora import add_adapters, causal_lm
from dapo.policy.policy import Policy
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.sharding import rank_device, uninitialized_copy


def model_source(config: Config, saved: Path | None) -> ModelConfig:
    """Return where to load weights from: the checkpoint `saved`, or with adapters always the original model.

    Adapters belong to the weights that they were trained on. A checkpoint has them merged.
    """
    if saved is None or config.model.lora.rank > 0:
        return config.model
    return config.model.model_copy(update={"path": str(saved)})


def build_policy(
    config: Config, saved: Path | None = None, parts: CustomParts | None = None
) -> tuple[LoadedModel, Policy]:
    """Return the loaded model and the policy. In a torch.distributed group, return this rank's shard of the policy."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _build_sharded(config, saved, parts)
    loaded = load_model(model_source(config, saved))
    reference = load_model(config.model).model.requires_grad_(False) if _needs_second_model(config) else None
    return loaded, Policy(_to_train(loaded.model, config), config, reference, parts=parts)


def _build_sharded(config: Config, saved: Path | None, parts: CustomParts | None) -> tuple[LoadedModel, ShardedPolicy]:
    """Return the policy, and a model without weights as a template for a full copy."""
    device = rank_device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Weights are sharded from CPU memory, so that no GPU ever holds all of them.
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    place = {"dtype": dtype, "device": "cpu"}
    loaded = _load_once(model_source(config, saved).model_copy(update=place))
    blank = uninitialized_copy(loaded.model, "meta")
    policy = ShardedPolicy(_to_train(loaded.model, config), config, device=device, parts=parts)
    if _needs_second_model(config):  # loaded only now, when no rank holds the first model whole
        policy.add_reference(_load_once(config.model.model_copy(update=place)).model.requires_grad_(False))
    return replace(loaded, model=blank), policy


def _load_once(source: ModelConfig) -> LoadedModel:
    """Load the weights on rank 0 only. The other ranks wait, and get the model on the meta device."""
    loaded = load_model(source) if dist.get_rank() == 0 else None
    box: list[Any] = [loaded and (uninitialized_copy(loaded.model, "meta"), loaded.stop_ids)]
    dist.broadcast_object_list(box)
    if loaded is not None:
        return loaded
    model, stop_ids = box[0]
    return LoadedModel(model, load_tokenizer(source.path), stop_ids)


def _needs_second_model(config: Config) -> bool:
    """Return whether the reference is a model of its own. With adapters, they are switched off instead."""
    return config.needs_reference and config.model.lora.rank == 0


def _to_train(model: Any, config: Config) -> Any:
    """Add adapters if configured, and check that the model can be trained."""
    torch.manual_seed(config.run.seed)  # for the adapters' initial values; nothing else uses this generator
    ready = add_adapters(model, config.model.lora) if config.model.lora.rank > 0 else model
    if causal_lm(ready).device.type != "meta":  # ranks other than 0 have no weights to check
        check_model(causal_lm(ready), config.data.max_prompt_length + config.data.max_response_length)
    return ready
