"""Build the parts of a run: in this process, on the ranks of torchrun, or in actors on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from dapo.cluster import torchrun
from dapo.cluster.ray_connection import check_room, join, needs_ray, prepare, starts_here
from dapo.cluster.run_parts import Parts
from dapo.config import Config
from dapo.config.functions import CustomParts
from dapo.engine.build import build_engine, saved_weights
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.protocol import Engine
from dapo.engine.vllm.engine import check_vllm, require_vllm
from dapo.model.loading import resolve_path
from dapo.policy.build import build_policy, model_source
from dapo.rewards.judge import build_judge
from dapo.rewards.protocol import Judge
from dapo.system.progress import progress
from dapo.types import OnEvent

_MOST_AT_ONCE = 1024  # of Config.concurrent


def assemble(
    config: Config,
    saved: Path | None = None,
    on_event: OnEvent = lambda kind, message: None,
    is_stopping: Callable[[], bool] = lambda: False,
    custom: CustomParts | None = None,
) -> Parts:
    """Build learner, engine and judge as configured, with the weights of the checkpoint `saved` if there is one.

    Remote parts report events with `on_event(kind, message)`, and stop waiting when `is_stopping()` is true. `custom`
    has the user's functions that were given as objects.
    """
    source = config.model_copy(update={"model": model_source(config, saved)})
    if needs_ray(config):
        has_joined = _join(source)
        from dapo.cluster.ray_parts import ray_parts

        return ray_parts(config, saved, has_joined, on_event, is_stopping, custom)
    if (channel := torchrun.channel()) is not None:
        from dapo.cluster.torchrun_parts import torchrun_parts

        return torchrun_parts(config, saved, channel, custom)
    if config.rollout.engine == "vllm":  # before any weights are read
        check_vllm(config, resolve_path(source.model.path))
    loaded, policy = build_policy(config, saved, custom)
    if config.rollout.engine == "vllm":
        engine = build_engine(source, "vllm", policy.weights, transport=None)
    else:
        engine = embedded_engine(config, loaded, policy.causal_lm, reserved=policy.reserved_bytes)
        policy.sampler_bytes = engine.working_bytes
    if config.rollout.mode == "strict":  # in flight, the cache is never empty, so the update cannot borrow its memory
        policy.cache_bytes = engine.cache_bytes
    return Parts(policy, engine, loaded.tokenizer, loaded.stop_ids)


def assemble_samplers(config: Config, folder: Callable[[], Path], on_event: OnEvent) -> tuple[Engine, Judge]:
    """Build engine and judge as configured, without a learner. Close the engine first.

    The engine samples from `model.path`; `sync_weights` loads the checkpoint that `folder()` names.
    """
    alone = _without_learner(config)
    with ExitStack() as undo:
        judge = None
        if not config.cluster.reward_workers:  # first: report a broken reward before models are loaded
            judge = build_judge(config.reward)
            undo.callback(judge.close)
        if needs_ray(config):
            has_joined = _join(alone, has_learners=False)
            from dapo.cluster.ray_parts import ray_samplers

            engine, placed = ray_samplers(alone, folder, has_joined, on_event)
            judge = judge or placed
        else:
            engine = build_engine(alone, alone.rollout.engine, lambda: saved_weights(alone.model, folder()))
        undo.pop_all()
    assert judge is not None
    return engine, judge


def check_samplers(config: Config) -> None:
    """Check what can be checked about the engine before Ray is started and models are loaded."""
    if config.uses_vllm:
        require_vllm()
    if needs_ray(config):
        check_room(_without_learner(config), has_learners=False)


def _without_learner(config: Config) -> Config:
    """Return the configuration of an evaluation: as many engines as the run had, each with its device to itself."""
    workers = config.cluster.rollout_workers or config.cluster.learners
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"rollout_workers": workers}),
            # Evaluations sample more responses at once than training: decode as many together as a GPU can.
            "data": config.data.model_copy(update={"gen_batch_size": _MOST_AT_ONCE}),
        }
    )


def _join(config: Config, *, has_learners: bool = True) -> bool:
    """Check what can be checked before Ray is started, and join it. Return False if this process had joined before."""
    prepare(os.environ.get("RAY_ADDRESS"))  # before anything imports Ray
    check_room(config, has_learners=has_learners)
    if config.uses_vllm:
        require_vllm()
        # Check the model if a worker could run on this machine: other machines cannot be checked.
        gpus, device = torch.cuda.device_count(), config.model.device
        if device == "cpu" or gpus >= config.rollout.tensor_parallel or (starts_here() and device == "auto"):
            with progress("Asking vLLM about the model"):
                check_vllm(config, resolve_path(config.model.path), transport="memory")
    return join()
