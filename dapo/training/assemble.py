"""Builds the parts of a run that hold weights: in this process, on the ranks of torchrun, or placed by Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dapo.cluster import torchrun
from dapo.cluster.ray_connection import check_room, join, needs_ray, prepare, starts_here
from dapo.cluster.run_parts import Parts
from dapo.config import Config
from dapo.engine.embedded.build import embedded_engine
from dapo.model.loading import LoadedModel, resolve_path
from dapo.policy.build import build_policy, model_source
from dapo.policy.policy import Policy
from dapo.system.progress import progress

if TYPE_CHECKING:
    from dapo.engine.vllm.engine import VllmEngine


def assemble(
    config: Config,
    saved: Path | None = None,
    on_event: Callable[[str, str], None] = lambda kind, message: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Parts:
    """Build learner, engine and judge as configured, with the weights of the checkpoint `saved` if there is one.

    Remote parts report events by `on_event(kind, message)`, and stop waiting when `is_stopping()` is true.
    """
    if needs_ray(config):
        prepare()  # before anything imports Ray
        check_room(config)
        if config.uses_vllm:
            _check_placed_vllm(config, saved)
        has_joined = join()
        from dapo.cluster.ray_parts import ray_parts

        return ray_parts(config, saved, has_joined, on_event, is_stopping)
    if (channel := torchrun.channel()) is not None:
        from dapo.cluster.torchrun_parts import torchrun_parts

        return torchrun_parts(config, saved, channel)
    if config.rollout.engine == "vllm":
        _check_vllm(config, saved)
    loaded, policy = build_policy(config, saved)
    if config.rollout.engine == "vllm":
        engine = _vllm(config, saved, loaded, policy)
    else:
        engine = embedded_engine(config, loaded, policy.causal_lm, reserved=policy.optimizer.bytes_to_come)
    if config.rollout.mode == "strict":  # in flight, the cache is never empty, so the update cannot borrow its memory
        policy.cache_bytes = engine.cache_bytes
    return Parts(policy, engine, loaded.tokenizer, loaded.stop_ids, engine.cache_bytes, engine.release_cache)


def _check_vllm(config: Config, saved: Path | None) -> None:
    """Raise what can be known to be wrong with vLLM before any weights are read."""
    from dapo.engine.vllm.engine import check_vllm  # vLLM is an extra

    check_vllm(config, resolve_path(model_source(config, saved).path))


def _check_placed_vllm(config: Config, saved: Path | None) -> None:
    """Check vLLM for workers placed by Ray, if a worker could run on this machine: other machines cannot be checked."""
    from dapo.engine.vllm.engine import check_vllm, require_vllm

    require_vllm()
    gpus, device = torch.cuda.device_count(), config.model.device
    if device == "cpu" or gpus >= config.rollout.tensor_parallel or (starts_here() and device == "auto"):
        with progress("Asking vLLM about the model"):
            check_vllm(config, resolve_path(model_source(config, saved).path), transport="memory")


def _vllm(config: Config, saved: Path | None, loaded: LoadedModel, policy: Policy) -> VllmEngine:
    from dapo.engine.vllm.engine import open_vllm

    directory = resolve_path(model_source(config, saved).path)
    return open_vllm(config, directory, loaded.tokenizer, loaded.stop_ids, policy.weights)
