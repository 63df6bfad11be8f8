"""A run on Ray: start learners, rollout workers and reward workers as actors; the driver holds no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from dapo.cluster.placement import Bundle, Demand, Placement, wants_gpus
from dapo.cluster.ray_learners import RayLearnerRank, RayRanks
from dapo.cluster.remote_engine import RemoteEngine
from dapo.cluster.remote_judge import RemoteJudge, RewardWorker
from dapo.cluster.remote_learner import RemoteLearner
from dapo.cluster.rollout_worker import RolloutWorker, rollout_engine
from dapo.cluster.run_parts import Parts
from dapo.cluster.supervisor import Restarts, Rules
from dapo.config import Config
from dapo.config.functions import CustomParts, objects_for_learners, with_absolute_files
from dapo.engine.vllm.engine import Transport
from dapo.errors import PartError
from dapo.model.loading import load_tokenizer
from dapo.policy.build import model_source
from dapo.types import OnEvent

CPU_CONCURRENT = 64  # responses that a worker on a CPU decodes at once, unless rollout.max_concurrent is set

Place = tuple[int, Bundle]  # the index of a bundle, and a share of its resources


def ray_parts(
    config: Config,
    saved: Path | None,
    has_joined: bool,
    on_event: OnEvent,
    is_stopping: Callable[[], bool],
    custom: CustomParts | None = None,
) -> Parts:
    """Start all parts of the run on the cluster. Closing the engine ends all of them and frees their resources."""
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        tokenizer = load_tokenizer(model_source(config, saved).path)
        site = _reserve(undo, config, on_event, is_stopping)
        judge = _judge(undo, site)  # first: report a broken reward before models are loaded
        ranks = _ranks(site, saved, custom)
        undo.callback(ranks.close)
        # From here on, closing the engine also closes everything else.
        engine = _engine(site, ranks.stored_weights, undo.pop_all().close, ranks.broadcast)
    return Parts(RemoteLearner(ranks), engine, tokenizer, ranks.stop_ids, restart=ranks.restart, judge=judge)


def ray_samplers(
    config: Config, folder: Callable[[], Path], has_joined: bool, on_event: OnEvent
) -> tuple[RemoteEngine, RemoteJudge | None]:
    """Start rollout and reward workers without learners. New weights come from the checkpoint that `folder()` names."""
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        site = _reserve(undo, config, on_event, has_learners=False)
        judge = _judge(undo, site)
        return _engine(site, lambda: folder().absolute(), undo.pop_all().close), judge


@dataclass(frozen=True, slots=True)
class _Site:
    """Reserved resources and rules of supervision, shared by learners, engine and judge."""

    config: Config
    on_gpu: bool
    demand: Demand
    placement: Placement
    restarts: Restarts
    on_event: OnEvent
    is_stopping: Callable[[], bool]

    def rules(self, places: list[Place]) -> Rules:
        missing = partial(self.placement.missing, places)
        return Rules(self.restarts, self.config.cluster.timeout, missing, self.on_event, self.is_stopping)

    def actor(self, place: Place, kind: type, *arguments: Any, concurrency: int = 1, **options: Any) -> Any:
        resources = self.placement.options(place)
        return ray.remote(kind).options(**resources, max_concurrency=concurrency).remote(*arguments, **options)


def _reserve(
    undo: ExitStack,
    config: Config,
    on_event: OnEvent,
    is_stopping: Callable[[], bool] = lambda: False,
    *,
    has_learners: bool = True,
) -> _Site:
    config, on_gpu = with_absolute_path(config), wants_gpus(config)
    demand = Demand.of(config, on_gpu=on_gpu, has_learners=has_learners)
    placement = Placement(demand, config.cluster.timeout)
    undo.callback(placement.remove)
    return _Site(config, on_gpu, demand, placement, Restarts(config.cluster.max_restarts), on_event, is_stopping)


def _ranks(site: _Site, saved: Path | None, custom: CustomParts | None) -> RayRanks:
    demand, count = site.demand, len(site.demand.learners)
    places, shares_gpu = [demand.learner(rank) for rank in range(count)], not demand.rollout_workers

    def start(rank: int) -> Any:
        return site.actor(places[rank], RayLearnerRank, rank, count, shares_gpu=shares_gpu)

    config = with_absolute_files(site.config)
    objects = objects_for_learners(config, custom)
    try:
        cloudpickle.dumps(objects)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # it raises all kinds of errors
        raise PartError(
            f"a loss or schedule that is a Python object cannot be sent to the learners ({error}); name it as "
            "path/to/file.py:function"
        ) from error
    return RayRanks(start, count, config, saved, site.rules(places), objects)


def _engine(
    site: _Site,
    weights: Callable[[], Any],
    on_close: Callable[[], None],
    broadcast: Callable[[Sequence[Any], int], None] | None = None,
) -> RemoteEngine:
    config, demand, options = site.config, site.demand, site.config.model_dump_json()
    places = [demand.engine(slot) for slot in range(demand.engines)]
    kinds = config.rollout_engines or (config.rollout.engine,) * demand.engines
    # Weights go from GPU to GPU only if every worker runs vLLM on GPUs of its own; else through Ray's object store.
    if not (site.on_gpu and demand.rollout_workers and set(kinds) == {"vllm"}):
        broadcast = None
    transport: Transport = "broadcast" if broadcast is not None else "memory"

    def start(slot: int) -> Any:
        build = partial(rollout_engine, kinds[slot], options, transport=transport)
        return site.actor(places[slot], RolloutWorker, build)

    return RemoteEngine(
        start,
        demand.engines,
        weights,
        site.rules(places),
        # Twice as many as a worker decodes at once, so that it always has a group waiting.
        limit=2 * (config.concurrent if site.on_gpu else config.rollout.max_concurrent or CPU_CONCURRENT),
        broadcast=broadcast,
        on_close=on_close,
    )


def _judge(undo: ExitStack, site: _Site) -> RemoteJudge | None:
    places = [site.demand.judge(slot) for slot in range(len(site.demand.reward_workers))]
    if not places:
        return None

    def start(slot: int, concurrency: int) -> Any:
        return site.actor(places[slot], RewardWorker, concurrency=concurrency)

    judge = RemoteJudge(start, len(places), site.config.reward, site.rules(places))
    undo.callback(judge.close)
    return judge


def with_absolute_path(config: Config) -> Config:
    """Return the configuration with an absolute model path, because actors have other working directories."""
    path = Path(config.model.path).expanduser()
    if not path.exists():  # a hub id or a package
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})
