"""The Ray actor that samples: one engine, and the weights that it will sample from next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo.config import Config, EngineName
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.packed import unpacked
from dapo.engine.protocol import Engine
from dapo.engine.vllm.engine import Transport, open_vllm
from dapo.model.loading import load_model, load_tokenizer, resolve_path
from dapo.types import Request, Rollout

Weights = Mapping[str, Any]  # from `dapo.engine.packed`: arrays in memory that all processes of a node share


class RolloutWorker:
    def __init__(self, build: Callable[[Callable[[], Weights]], Engine]) -> None:
        self.build = build
        self.weights: Weights = {}

    def open(self) -> None:
        self.engine = self.build(lambda: self.weights)

    def step(self, requests: Sequence[Request], versions: Sequence[int], weights: Weights | None) -> list[Rollout]:
        """Apply new weights, accept requests, and decode until at least one response is finished."""
        if weights is not None:
            self.weights = weights
        for version in versions:
            self.engine.sync_weights(version)
        self.weights = {}  # drop the reference, so that Ray can free the shared memory
        if requests:
            self.engine.submit(requests)
        return self.engine.poll()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call any other method of the engine."""
        return getattr(self.engine, name)(*arguments, **options)


class Follower:
    """An embedded engine on its own copy of the model, into which `sync_weights` copies the new weights."""

    def __init__(self, engine: EmbeddedEngine, model: Any, weights: Callable[[], Weights]) -> None:
        self.engine, self.model, self.weights = engine, model, weights
        self.submit, self.poll, self.cancel = engine.submit, engine.poll, engine.cancel
        self.figures, self.release_cache, self.close = engine.figures, engine.release_cache, engine.close

    def sync_weights(self, version: int) -> None:
        own = self.model.state_dict()
        for name, tensor in unpacked(self.weights()):
            own[name].copy_(tensor)
        self.engine.sync_weights(version)


def rollout_engine(
    kind: EngineName,
    options: str,
    stop_ids: frozenset[int],
    weights: Callable[[], Weights],
    transport: Transport = "memory",
) -> Engine:
    """Build the engine of a rollout worker, with the recipe's model. Trained weights follow by `sync_weights`."""
    config = Config.model_validate_json(options)
    if kind == "vllm":
        directory, tokenizer = resolve_path(config.model.path), load_tokenizer(config.model.path)
        return open_vllm(config, directory, tokenizer, stop_ids, lambda: unpacked(weights()), transport=transport)
    loaded = load_model(config.model)
    return Follower(embedded_engine(config, loaded, loaded.model), loaded.model, weights)
