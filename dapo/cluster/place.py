"""A run on Ray: start learners, rollout workers and reward workers as actors; the driver holds no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from dapo.cluster.actor import Restarts, RolloutWorker, Weights
from dapo.cluster.engine import RayEngine
from dapo.cluster.judges import PlacedJudge, RewardWorker
from dapo.cluster.learners import LearnerGroup, LearnerRank
from dapo.cluster.parts import Parts
from dapo.cluster.placement import Bundle, Demand, Placement, wants_gpus
from dapo.config import Config, EngineName
from dapo.engine.build import build_engine, saved_weights
from dapo.engine.packed import unpacked
from dapo.engine.protocol import Engine
from dapo.engine.vllm.engine import Transport
from dapo.model.loading import load_tokenizer
from dapo.policy.build import model_source
from dapo.types import EventKind

CPU_CONCURRENT = 64  # responses that a worker on a CPU decodes at once, unless rollout.max_concurrent is set


def rollout_engine(
    kind: EngineName, options: str, weights: Callable[[], Weights | Path], transport: Transport = "memory"
) -> Engine:
    """Build the engine of a rollout worker, with the recipe's model. Other weights follow by `sync_weights`.

    They come from learners, or from a checkpoint that this worker reads itself.
    """
    config = Config.model_validate_json(options)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        newest = weights()
        return saved_weights(config.model, newest) if isinstance(newest, Path) else unpacked(newest)

    return build_engine(config, kind, tensors, transport)


@dataclass(frozen=True, slots=True)
class _Site:
    """Arguments that learners, engine and judges have in common."""

    config: Config
    on_gpu: bool
    demand: Demand
    placement: Placement
    restarts: Restarts
    on_event: Callable[[EventKind, str], None]
    is_stopping: Callable[[], bool]

    def watch(self, place: Callable[[int], tuple[int, Bundle]], count: int) -> dict[str, Any]:
        """Return the callbacks of a group of `count` processes: missing resources, events, and whether to stop."""
        missing = partial(self.placement.missing, [place(slot) for slot in range(count)])
        return {"missing": missing, "on_event": self.on_event, "is_stopping": self.is_stopping}


def place(
    config: Config,
    saved: Path | None,
    has_joined: bool,
    on_event: Callable[[EventKind, str], None],
    is_stopping: Callable[[], bool],
) -> Parts:
    """Start all parts of the run on the cluster. Closing the engine ends them and frees the reserved resources."""
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        tokenizer = load_tokenizer(model_source(config, saved).path)
        site = _reserve(undo, config, on_event, is_stopping)
        judge = _place_judges(undo, site)  # first: report a broken reward before models are loaded
        learners = _place_learners(site, saved)
        undo.callback(learners.close)
        # From here on, closing the engine undoes all.
        engine = _place_engine(site, learners.stored_weights, undo.pop_all().close, learners.broadcast)
    return Parts(
        learners,
        engine,
        tokenizer,
        learners.stop_ids,
        release_cache=engine.release_cache,
        restart=learners.restart,
        judge=judge,
    )


def place_samplers(
    config: Config, folder: Callable[[], Path], has_joined: bool, on_event: Callable[[EventKind, str], None]
) -> tuple[RayEngine, PlacedJudge | None]:
    """Start rollout workers and reward workers without learners. New weights are those of the checkpoint `folder()`."""
    with ExitStack() as undo:
        if has_joined:
            undo.callback(ray.shutdown)
        site = _reserve(undo, config, on_event, has_learners=False)
        judge = _place_judges(undo, site)
        return _place_engine(site, lambda: folder().absolute(), undo.pop_all().close), judge


def _reserve(
    undo: ExitStack,
    config: Config,
    on_event: Callable[[EventKind, str], None],
    is_stopping: Callable[[], bool] = lambda: False,
    *,
    has_learners: bool = True,
) -> _Site:
    config, on_gpu = with_absolute_path(config), wants_gpus(config)
    demand = Demand.of(config, on_gpu=on_gpu, has_learners=has_learners)
    placement = Placement(demand, config.cluster.timeout)
    undo.callback(placement.remove)
    return _Site(config, on_gpu, demand, placement, Restarts(config.cluster.max_restarts), on_event, is_stopping)


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


def _place_engine(
    site: _Site,
    weights: Callable[[], Any],
    on_close: Callable[[], None],
    broadcast: Callable[[Sequence[Any], int], None] | None = None,
) -> RayEngine:
    config, demand, placement = site.config, site.demand, site.placement
    kinds = config.rollout_engines or (config.rollout.engine,) * demand.engines
    options = config.model_dump_json()
    # Weights go from GPU to GPU only if every worker runs vLLM on GPUs of its own; else through Ray's object store.
    if not (site.on_gpu and demand.rollout_workers and set(kinds) == {"vllm"}):
        broadcast = None
    transport: Transport = "broadcast" if broadcast is not None else "memory"
    return RayEngine(
        lambda slot: _actor(
            RolloutWorker,
            placement.options(demand.engine(slot)),
            partial(rollout_engine, kinds[slot], options, transport=transport),
        ),
        demand.engines,
        weights,
        # Twice what a worker decodes at once, so that it always has the next group at hand.
        limit=2 * (config.concurrent if site.on_gpu else config.rollout.max_concurrent or CPU_CONCURRENT),
        restarts=site.restarts,
        timeout=config.cluster.timeout,
        broadcast=broadcast,
        on_close=on_close,
        **site.watch(demand.engine, demand.engines),
    )


def _place_judges(undo: ExitStack, site: _Site) -> PlacedJudge | None:
    demand, placement, count = site.demand, site.placement, len(site.demand.reward_workers)
    if not count:
        return None
    judge = PlacedJudge(
        lambda slot, concurrency: _actor(
            RewardWorker, {**placement.options(demand.judge(slot)), "max_concurrency": concurrency}
        ),
        count,
        site.config.reward,
        restarts=site.restarts,
        timeout=site.config.cluster.timeout,
        **site.watch(demand.judge, count),
    )
    undo.callback(judge.close)
    return judge


def with_absolute_path(config: Config) -> Config:
    """Return the configuration with an absolute model path, since actors have other working directories."""
    path = Path(config.model.path).expanduser()
    if not path.exists():  # a hub id or a package
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})


def _actor(kind: type, options: dict[str, Any], *arguments: Any) -> Any:
    return ray.remote(kind).options(**options).remote(*arguments)
