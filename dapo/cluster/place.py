"""A run on Ray: learners and rollout workers in processes of their own, and a driver that holds no weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray

from dapo.assemble import Parts, embedded_engine, model_source
from dapo.cluster.learners import LearnerGroup, LearnerRank
from dapo.cluster.placement import Demand, Placement, wants_gpus
from dapo.config import Config
from dapo.engine._vllm_args import require_vllm
from dapo.engine.actor import Restarts, RolloutWorker, Weights
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.packed import unpacked
from dapo.engine.protocol import Engine
from dapo.engine.ray import RayEngine
from dapo.model.loading import load_model, load_tokenizer, resolve_path

CPU_CONCURRENT = 64  # responses that a worker decodes side by side where nothing says otherwise


class Follower:
    """An embedded engine on a copy of the weights, which it takes over whenever they change."""

    def __init__(self, engine: EmbeddedEngine, model: Any, weights: Callable[[], Weights]) -> None:
        self.engine, self.model, self.weights = engine, model, weights
        self.submit, self.poll, self.cancel = engine.submit, engine.poll, engine.cancel
        self.figures, self.release_cache, self.close = engine.figures, engine.release_cache, engine.close

    def sync_weights(self, version: int) -> None:
        own = self.model.state_dict()
        for name, tensor in unpacked(self.weights()):
            own[name].copy_(tensor)
        self.engine.sync_weights(version)


def rollout_engine(options: str, stop_ids: frozenset[int], weights: Callable[[], Weights]) -> Engine:
    """In a rollout worker. It starts from the model that the recipe names, and is then told what has been learnt."""
    config = Config.model_validate_json(options)
    if config.rollout.engine == "vllm":
        from dapo.engine.vllm import open_vllm

        directory, tokenizer = resolve_path(config.model.path), load_tokenizer(config.model.path)
        return open_vllm(config, directory, tokenizer, stop_ids, lambda: unpacked(weights()), transport="memory")
    loaded = load_model(config.model)
    return Follower(embedded_engine(config, loaded, loaded.model), loaded.model, weights)


def place(
    config: Config,
    saved: Path | None,
    has_joined: bool,
    on_event: Callable[[str, str], None],
    is_stopping: Callable[[], bool],
) -> Parts:
    """Put the parts where there is room for them; closing the engine gives all of it back."""
    config = with_absolute_path(config)
    if config.rollout.engine == "vllm":
        require_vllm()
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        tokenizer = load_tokenizer(model_source(config, saved).path)
        demand = Demand.of(config, on_gpu=wants_gpus(config))
        placement = Placement(demand, config.cluster.timeout)
        undo.callback(placement.remove)
        restarts = Restarts(config.cluster.max_restarts)
        learners = LearnerGroup(
            lambda rank: _actor(LearnerRank, placement.options(demand.learner(rank)), rank, demand.learners),
            demand.learners,
            config,
            saved,
            restarts,
            shares_gpu=demand.rollout_workers == 0,
            missing=lambda: placement.missing(map(demand.learner, range(demand.learners))),
            on_event=on_event,
            is_stopping=is_stopping,
        )
        undo.callback(learners.close)
        build = partial(rollout_engine, config.model_dump_json(), learners.stop_ids)
        engine = RayEngine(
            lambda slot: _actor(RolloutWorker, placement.options(demand.engine(slot)), build),
            demand.engines,
            learners.stored_weights,
            limit=2 * (config.concurrent if learners.on_gpu else config.rollout.max_concurrent or CPU_CONCURRENT),
            restarts=restarts,
            timeout=config.cluster.timeout,
            missing=lambda: placement.missing(map(demand.engine, range(demand.engines))),
            on_event=on_event,
            is_stopping=is_stopping,
            on_close=undo.pop_all().close,
        )
    return Parts(
        learners, engine, tokenizer, learners.stop_ids, release_cache=engine.release_cache, restart=learners.restart
    )


def with_absolute_path(config: Config) -> Config:
    """Other processes have other working directories."""
    path = Path(config.model.path).expanduser()
    if not path.exists():  # a hub id, or a package
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})


def _actor(kind: type, options: dict[str, Any], *arguments: Any) -> Any:
    return ray.remote(kind).options(**options).remote(*arguments)
