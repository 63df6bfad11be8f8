"""The engine and the judge of `dapo eval`, which serve one model after the other."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import torch

from dapo.cluster.assemble import assemble_samplers
from dapo.cluster.ray_connection import needs_ray
from dapo.config import Config
from dapo.engine.protocol import Engine
from dapo.model.loading import resolve_device, resolve_path
from dapo.rewards.protocol import Judge
from dapo.types import OnEvent


class SharedParts:
    """Engine and judge of the newest model. The next model gets the same ones if only its weights differ.

    Starting vLLM or the workers of a cluster takes a minute or more, and loading other weights seconds.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event = on_event
        self.opened = ExitStack()
        self.parts: tuple[Engine, Judge] | None = None
        self.needs: Any = None  # of the model that the parts were built for
        self.version = 0  # of the engine's weights: counts the models that it has served before this one

    def open(self, config: Config) -> tuple[Engine, Judge]:
        """Return an engine with the weights of `model.path`, and the judge. The next call may close them."""
        self.folder, needs = resolve_path(config.model.path), _needs(config)
        if self.parts is not None and needs == self.needs and _starts_slowly(config):
            self.version += 1
            self.parts[0].sync_weights(self.version)
            return self.parts
        self.close()
        engine, judge = self.parts = assemble_samplers(config, lambda: self.folder, self.on_event)
        self.opened.callback(judge.close)
        self.opened.callback(engine.close)
        self.needs, self.version = needs, 0
        return self.parts

    def close(self) -> None:
        self.opened.close()
        self.parts = None
        gc.collect()  # free the memory for the next model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _starts_slowly(config: Config) -> bool:
    """Return False for the embedded engine on a CPU. It starts at once, and new weights would need memory beside it."""
    return needs_ray(config) or config.uses_vllm or resolve_device(config.model.device).type == "cuda"


def _needs(config: Config) -> Any:
    """Return what two models must have in common to share engine and judge: options, architecture and tokenizer."""
    files = [path for path in resolve_path(config.model.path).iterdir() if not path.name.endswith(".index.json")]
    return (
        config.model.model_copy(update={"path": ""}),
        config.longest,
        config.rollout.model_dump(exclude={"n", "temperature", "mode"}),
        config.reward,
        config.cluster,
        {path.name: path.read_bytes() for path in files if path.suffix in (".json", ".jinja", ".txt", ".model")},
    )
