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
from dapo.cluster.ray_learners import RayLearnerRank, RayRanks
from dapo.cluster.remote_engine import RemoteEngine
from dapo.cluster.remote_judge import RemoteJudge, RewardWorker
from dapo.cluster.remote_learner import RemoteLearner
from dapo.cluster.rollout_worker import RolloutWorker, rollout_engine
from dapo.cluster.run_parts import Parts
from dapo.cluster.supervisor import Restarts, Rules
from dapo.config import Config
from dapo.engine.vllm.engine import Transport
from dapo.model.loading import load_tokenizer
from dapo.policy.build import model_source

CPU_CONCURRENT = 64  # responses that a worker on a CPU decodes at once, unless rollout.max_concurrent is set

Place = tuple[int, Bundle]  # the index of a bundle, and a share of its resources


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
        site = _Site(config, placement, Restarts(config.cluster.max_restarts), on_event, is_stopping)
        judge = None
        if config.cluster.reward_workers:  # first: report a broken reward before models are loaded
            judge = _judge(site, demand)
            undo.callback(judge.close)
        ranks = _ranks(site, demand, saved)
        undo.callback(ranks.close)
        engine = _engine(site, demand, ranks, undo.pop_all().close)  # from here on, closing the engine undoes all
    return Parts(
        RemoteLearner(ranks),
        engine,
        tokenizer,
        ranks.stop_ids,
        release_cache=engine.release_cache,
        restart=ranks.restart,
        judge=judge,
    )


@dataclass(frozen=True, slots=True)
class _Site:
    """What learners, engine and judge have in common."""

    config: Config
    placement: Placement
    restarts: Restarts
    on_event: Callable[[str, str], None]
    is_stopping: Callable[[], bool]

    def rules(self, places: list[Place]) -> Rules:
        missing = partial(self.placement.missing, places)
        return Rules(self.restarts, self.config.cluster.timeout, missing, self.on_event, self.is_stopping)

    def actor(self, place: Place, kind: type, *arguments: Any, concurrency: int = 1, **options: Any) -> Any:
        resources = self.placement.options(place)
        return ray.remote(kind).options(**resources, max_concurrency=concurrency).remote(*arguments, **options)


def _ranks(site: _Site, demand: Demand, saved: Path | None) -> RayRanks:
    count = len(demand.learners)
    places, shares_gpu = [demand.learner(rank) for rank in range(count)], not demand.rollout_workers

    def start(rank: int) -> Any:
        return site.actor(places[rank], RayLearnerRank, rank, count, shares_gpu=shares_gpu)

    return RayRanks(start, count, site.config, saved, site.rules(places))


def _engine(site: _Site, demand: Demand, ranks: RayRanks, on_close: Callable[[], None]) -> RemoteEngine:
    config, options = site.config, site.config.model_dump_json()
    places = [demand.engine(slot) for slot in range(demand.engines)]
    kinds = config.rollout_engines or (config.rollout.engine,) * len(demand.learners)
    # Weights go from GPU to GPU only if every worker runs vLLM on GPUs of its own; else through Ray's object store.
    is_broadcast = ranks.on_gpu and bool(demand.rollout_workers) and set(kinds) == {"vllm"}
    transport: Transport = "broadcast" if is_broadcast else "memory"

    def start(slot: int) -> Any:
        build = partial(rollout_engine, kinds[slot], options, ranks.stop_ids, transport=transport)
        return site.actor(places[slot], RolloutWorker, build)

    return RemoteEngine(
        start,
        demand.engines,
        ranks.stored_weights,
        site.rules(places),
        # Twice what a worker decodes at once, so that it always has the next group at hand.
        limit=2 * (config.concurrent if ranks.on_gpu else config.rollout.max_concurrent or CPU_CONCURRENT),
        broadcast=ranks.broadcast if is_broadcast else None,
        on_close=on_close,
    )


def _judge(site: _Site, demand: Demand) -> RemoteJudge:
    places = [demand.judge(slot) for slot in range(len(demand.reward_workers))]

    def start(slot: int, concurrency: int) -> Any:
        return site.actor(places[slot], RewardWorker, concurrency=concurrency)

    return RemoteJudge(start, len(places), site.config.reward, site.rules(places))


def with_absolute_path(config: Config) -> Config:
    """Return the configuration with an absolute model path, since actors have other working directories."""
    path = Path(config.model.path).expanduser()
    if not path.exists():  # a hub id or a package
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})
