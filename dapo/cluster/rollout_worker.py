"""The Ray actor that samples: one engine, and the weights that it will sample from next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dapo.config import Config, EngineName
from dapo.engine.build import build_engine, saved_weights
from dapo.engine.packed import unpacked
from dapo.engine.protocol import Engine
from dapo.engine.vllm.engine import Transport
from dapo.types import Extension, Request, Rollout

Weights = Mapping[str, Any]  # from `dapo.engine.packed`: arrays in memory that all processes of a node share


class RolloutWorker:
    def __init__(self, build: Callable[[Callable[[], Weights]], Engine]) -> None:
        self.build = build
        self.weights: Weights = {}

    def open(self) -> None:
        self.engine = self.build(lambda: self.weights)

    def step(
        self, work: Sequence[Request | Extension], versions: Sequence[int], weights: Weights | None
    ) -> list[Rollout]:
        """Apply new weights, accept groups and next turns, and decode until at least one response is finished."""
        if weights is not None:
            self.weights = weights
        for version in versions:
            self.engine.sync_weights(version)
        self.weights = {}  # drop the reference, so that Ray can free the shared memory
        if requests := [each for each in work if isinstance(each, Request)]:
            self.engine.submit(requests)
        if extensions := [each for each in work if isinstance(each, Extension)]:
            self.engine.extend(extensions)
        return self.engine.poll()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call any other method of the engine."""
        return getattr(self.engine, name)(*arguments, **options)


def rollout_engine(
    kind: EngineName, options: str, weights: Callable[[], Weights | Path], transport: Transport = "memory"
) -> Engine:
    """Build the engine of a rollout worker with the recipe's model. `sync_weights` replaces its weights later.

    New weights come from learners, or from a checkpoint that this worker reads itself.
    """
    config = Config.model_validate_json(options)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        newest = weights()
        return saved_weights(config.model, newest) if isinstance(newest, Path) else unpacked(newest)

    return build_engine(config, kind, tensors, transport)
