"""Build the embedded engine from a configuration."""

from __future__ import annotations

import torch

from dapo.config import Config
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.loading import LoadedModel


def embedded_engine(config: Config, loaded: LoadedModel, model: torch.nn.Module, reserved: int = 0) -> EmbeddedEngine:
    """Return an engine that samples from `model` and leaves `reserved` bytes of its device to others."""
    on_gpu = loaded.model.device.type == "cuda"
    return EmbeddedEngine(
        model,
        loaded.tokenizer,
        loaded.stop_ids,
        config.run.seed,
        config.concurrent if on_gpu else config.rollout.max_concurrent,
        max_length=config.longest,
        kv_memory_fraction=config.rollout.kv_memory_fraction,
        reserved=reserved,
        kept_tokens=config.reward.think_tags or (),
    )
