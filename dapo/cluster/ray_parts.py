"""A run on Ray: start learners, rollout workers and reward workers as actors; the driver holds no weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from dapo.cluster.placement import Bundle, Demand, Placement, wants_gpus
from dapo.cluster.ray_learners import LearnerGroup, LearnerRank
from dapo.cluster.remote_engine import RayEngine
from dapo.cluster.remote_judge import PlacedJudge, RewardWorker
from dapo.cluster.rollout_worker import Restarts, RolloutWorker, Weights
from dapo.cluster.run_parts import Parts
from dapo.config import Config, EngineName
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.packed import unpacked
from dapo.engine.protocol import Engine
from dapo.engine.vllm.engine import Transport, open_vllm
from dapo.model.loading import load_model, load_tokenizer, resolve_path
from dapo.policy.build import model_source

CPU_CONCURRENT = 64  # responses that a worker on a CPU decodes at once, unless rollout.max_concurrent is set


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


@dataclass(frozen=True, slots=True)
class _Site:
    """Arguments that learners, engine and judges have in common."""

    config: Config
    demand: Demand
    placement: Placement
    restarts: Restarts
    on_event: Callable[[str, str], None]
    is_stopping: Callable[[], bool]

    def watch(self, place: Callable[[int], tuple[int, Bundle]], count: int) -> dict[str, Any]:
        """Return the callbacks of a group of `count` processes: missing resources, events, and whether to stop."""
        missing = partial(self.placement.missing, [place(slot) for slot in range(count)])
        return {"missing": missing, "on_event": self.on_event, "is_stopping": self.is_stopping}


def ray_parts(
    config: Config,
    saved: Path | None,
    has_joined: bool,
    on_event: Callable[[str, str], None],
    is_stopping: Callable[[], bool],
) -> Parts:
    """Start all parts of the run on the cluster. Closing the engine ends them and frees the reserved resources."""
    config = with_absolute_path(config)
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        tokenizer = load_tokenizer(model_source(config, saved).path)
        demand = Demand.of(config, on_gpu=wants_gpus(config))
        placement = Placement(demand, config.cluster.timeout)
        undo.callback(placement.remove)
        site = _Site(config, demand, placement, Restarts(config.cluster.max_restarts), on_event, is_stopping)
        judge = None
        if config.cluster.reward_workers:  # first: report a broken reward before models are loaded
            judge = _place_judges(site)
            undo.callback(judge.close)
        learners = _place_learners(site, saved)
        undo.callback(learners.close)
        engine = _place_engine(site, learners, undo.pop_all().close)  # from here on, closing the engine undoes all
    return Parts(
        learners,
        engine,
        tokenizer,
        learners.stop_ids,
        release_cache=engine.release_cache,
        restart=learners.restart,
        judge=judge,
    )


def _place_learners(site: _Site, saved: Path | None) -> LearnerGroup:
    demand, placement, count = site.demand, site.placement, len(site.demand.learners)
    return LearnerGroup(
        lambda rank: _actor(LearnerRank, placement.options(demand.learner(rank)), rank, count),
        count,
        site.config,
        saved,
        site.restarts,
        shares_gpu=not demand.rollout_workers,
        **site.watch(demand.learner, count),
    )


def _place_engine(site: _Site, learners: LearnerGroup, on_close: Callable[[], None]) -> RayEngine:
    config, demand, placement = site.config, site.demand, site.placement
    kinds = config.rollout_engines or (config.rollout.engine,) * len(demand.learners)
    options = config.model_dump_json()
    # Weights go from GPU to GPU only if every worker runs vLLM on GPUs of its own; else through Ray's object store.
    is_broadcast = learners.on_gpu and bool(demand.rollout_workers) and set(kinds) == {"vllm"}
    transport: Transport = "broadcast" if is_broadcast else "memory"
    return RayEngine(
        lambda slot: _actor(
            RolloutWorker,
            placement.options(demand.engine(slot)),
            partial(rollout_engine, kinds[slot], options, learners.stop_ids, transport=transport),
        ),
        demand.engines,
        learners.stored_weights,
        # Twice what a worker decodes at once, so that it always has the next group at hand.
        limit=2 * (config.concurrent if learners.on_gpu else config.rollout.max_concurrent or CPU_CONCURRENT),
        restarts=site.restarts,
        timeout=config.cluster.timeout,
        broadcast=learners.broadcast if is_broadcast else None,
        on_close=on_close,
        **site.watch(demand.engine, demand.engines),
    )


def _place_judges(site: _Site) -> PlacedJudge:
    demand, placement, count = site.demand, site.placement, len(site.demand.reward_workers)
    return PlacedJudge(
        lambda slot, concurrency: _actor(
            RewardWorker, {**placement.options(demand.judge(slot)), "max_concurrency": concurrency}
        ),
        count,
        site.config.reward,
        restarts=site.restarts,
        timeout=site.config.cluster.timeout,
        **site.watch(demand.judge, count),
    )


def with_absolute_path(config: Config) -> Config:
    """Return the configuration with an absolute model path, since actors have other working directories."""
    path = Path(config.model.path).expanduser()
    if not path.exists():  # a hub id or a package
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})


def _actor(kind: type, options: dict[str, Any], *arguments: Any) -> Any:
    return ray.remote(kind).options(**options).remote(*arguments)
