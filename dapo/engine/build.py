"""Build an engine that has its own copy of the model: embedded or vLLM, here or in a worker's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dapo.config import Config, EngineName, ModelConfig
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.vllm.engine import Transport, VllmEngine, open_vllm
from dapo.model.forward import check_model
from dapo.model.loading import load_model, load_vocabulary, resolve_device, resolve_dtype, resolve_path

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class Follower:
    """An embedded engine on its own copy of the model, into which `sync_weights` copies the new weights."""

    def __init__(self, engine: EmbeddedEngine, model: Any, weights: Weights) -> None:
        self.engine, self.model, self.weights = engine, model, weights
        self.submit, self.poll, self.cancel = engine.submit, engine.poll, engine.cancel
        self.extend, self.end, self.is_repeatable = engine.extend, engine.end, engine.is_repeatable
        self.metrics, self.suspend, self.close = engine.metrics, engine.suspend, engine.close
        self.cache_bytes = engine.cache_bytes

    def sync_weights(self, version: int) -> None:
        own = self.model.state_dict()
        for name, tensor in self.weights():
            own[name].copy_(tensor)
        self.engine.sync_weights(version)


def build_engine(
    config: Config, kind: EngineName, weights: Weights, transport: Transport | None = "memory"
) -> VllmEngine | Follower:
    """Build an engine that samples from `model.path`. `sync_weights` replaces its weights by what `weights` yields.

    `transport` None: vLLM chooses by the device of this process's learner.
    """
    if kind == "vllm":
        tokenizer, stop_ids = load_vocabulary(config.model.path)
        return open_vllm(config, resolve_path(config.model.path), tokenizer, stop_ids, weights, transport)
    loaded = load_model(config.model)
    loaded.model.requires_grad_(False)
    check_model(loaded.model, config.longest)
    return Follower(embedded_engine(config, loaded, loaded.model), loaded.model, weights)


def saved_weights(options: ModelConfig, folder: Path) -> Iterable[tuple[str, Tensor]]:
    """Load the weights of a checkpoint into main memory, with the names and the precision that engines expect."""
    dtype = str(resolve_dtype(options.dtype, resolve_device(options.device))).removeprefix("torch.")
    source = options.model_copy(update={"path": str(folder), "device": "cpu", "dtype": dtype})
    return load_model(source).model.state_dict().items()
