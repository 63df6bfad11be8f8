"""The learner protocol over Ray actors: each actor is one FSDP rank, and if one is lost all are restarted."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import Tensor

from dapo.cluster.rollout_worker import Restarts, explain
from dapo.config import Config
from dapo.engine.packed import packed, unpacked
from dapo.errors import ClusterLost, DapoError, LearnerLost
from dapo.model.loading import resolve_device
from dapo.policy.build import build_policy
from dapo.policy.protocol import UpdateResult
from dapo.policy.sharding import backend
from dapo.system.progress import progress
from dapo.types import Group

TICK = 1.0  # seconds between checks of the timeout
DEATH_NOTICE = 3.0  # seconds to wait until Ray has reported which rank died; the others fail because of it


class LearnerRank:
    """Ray actor that is one rank of the group that shards the trained weights."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def address(self) -> str:
        """Return an address on this node, with a free port, for the ranks to rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def open(self, options: str, saved: Path | None, address: str) -> tuple[frozenset[int], bool]:
        """Join the process group and load the model. Return its stop tokens, and whether it is on a GPU."""
        config = Config.model_validate_json(options)
        on_gpu = resolve_device(config.model.device).type == "cuda"
        if self.world > 1:
            dist.init_process_group(
                backend(on_gpu),
                init_method=address,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=config.cluster.timeout),
            )
        loaded, self.policy = build_policy(config, saved)
        return loaded.stop_ids, on_gpu

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the policy, which all ranks must do together. Only rank 0 returns its result."""
        answer = getattr(self.policy, name)(*arguments)
        return answer if self.rank == 0 else None

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def get(self, name: str) -> Any:
        return getattr(self.policy, name)

    def set(self, name: str, value: Any) -> None:
        setattr(self.policy, name, value)

    def connect(self, workers: Sequence[Any], size: int, address: str) -> None:
        """Prepare to send weights to these rollout workers, each with `size` GPUs."""
        from dapo.cluster.broadcast import Broadcast  # needs vLLM, which is an optional dependency

        self.broadcast = Broadcast(self.policy.weights, workers, size, address, self.rank)

    def send_weights(self, version: int) -> None:
        self.broadcast.send(version)

    def packed_weights(self) -> tuple[bool, Any]:
        """Gather the weights on rank 0. Two return values: the caller waits for the first without fetching the second.

        Gathering is a collective, so the other ranks must iterate as well.
        """
        if self.rank == 0:
            return True, packed(self.policy.weights())
        for _ in self.policy.weights():
            pass
        return True, None


class LearnerGroup:
    """The learner protocol over `count` ranks that `start(rank)` creates.

    When one rank is lost, all are killed and `LearnerLost` is raised; the caller then calls `restart`.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        config: Config,
        saved: Path | None,
        restarts: Restarts,
        *,
        shares_gpu: bool = False,
        missing: Callable[[], str | None] = lambda: None,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.start, self.count, self.config, self.restarts = start, count, config, restarts
        self.missing, self.on_event, self.is_stopping = missing, on_event, is_stopping
        self.shares_gpu = shares_gpu  # an engine uses the same GPU, in turns
        self.ranks: list[Any] = []
        self.on_gpu = False
        self.stop_ids: frozenset[int] = frozenset()
        self.waiting_for: str | None = None
        self.batch: tuple[Sequence[Group], Any] = ((), None)  # the last batch and its reference in the store
        self.connected: Sequence[Any] = ()  # rollout workers in the current NCCL group
        self._open(saved)

    def restart(self, lost: LearnerLost, saved: Path | None) -> None:
        """Start all ranks again from this checkpoint, or from the initial model if it is None."""
        self.restarts.spend(str(lost))
        try:
            self._open(saved)
        except LearnerLost as again:
            self.restart(again, saved)

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        result = self._call("update", self._stored(groups), step, version)
        if self.needs_cache:  # the engine on the same GPU cannot use memory that PyTorch caches
            self._ask([rank.empty_cache.remote() for rank in self.ranks])
        return result

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        return self._call("reference_logprobs", ray.put(groups))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return unpacked(ray.get(self.stored_weights()))

    def stored_weights(self) -> Any:
        """Return the reference of the weights in Ray's object store. The driver never holds the weights itself."""
        calls = [rank.packed_weights.options(num_returns=2).remote() for rank in self.ranks]
        self._ask([done for done, _ in calls])
        return calls[0][1]

    def broadcast(self, workers: Sequence[Any], version: int) -> None:
        """Send the weights from the first learner's GPU directly to the GPUs of these workers."""
        if workers != self.connected:
            (address,) = self._ask([self.ranks[0].address.remote()])
            size = self.config.rollout.tensor_parallel
            self._ask([rank.connect.remote(workers, size, address) for rank in self.ranks])
            self.connected = workers
        self._ask([rank.send_weights.remote(version) for rank in self.ranks])

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        if not self.on_gpu:
            return {}
        return self._call("efficiency", self._stored(batch), replace(update, token_stats={}), seconds)

    @property
    def needs_cache(self) -> bool:
        return self.shares_gpu and self.on_gpu

    def memory_plan(self, cache_bytes: int) -> str | None:
        return self._call("memory_plan", cache_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        return self._ask([self.ranks[0].get.remote("checkpoint_bytes")])[0]

    def save(self, folder: Path) -> None:
        self._call("save", folder.absolute())

    def restore(self, folder: Path) -> None:
        self._call("restore", folder.absolute())

    @property
    def non_finite_in_a_row(self) -> int:
        return self._ask([self.ranks[0].get.remote("non_finite_in_a_row")])[0]

    @non_finite_in_a_row.setter
    def non_finite_in_a_row(self, value: int) -> None:
        self._ask([rank.set.remote("non_finite_in_a_row", value) for rank in self.ranks])

    def close(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []

    def _open(self, saved: Path | None) -> None:
        self.ranks, self.connected = [self.start(rank) for rank in range(self.count)], ()
        options, folder = self.config.model_dump_json(), saved.absolute() if saved else None
        with progress(f"Loading the model in {self.count} learner{'s' * (self.count > 1)}"):
            (address,) = self._ask([self.ranks[0].address.remote()])
            answers = self._ask([rank.open.remote(options, folder, address) for rank in self.ranks])
        self.stop_ids, self.on_gpu = answers[0]

    def _stored(self, groups: Sequence[Group]) -> Any:
        """Put a batch into Ray's store once, for all ranks and for repeated calls with the same batch."""
        if self.batch[0] is not groups or self.batch[1] is None:
            self.batch = groups, ray.put(groups)
        return self.batch[1]

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._ask([rank.call.remote(name, *arguments) for rank in self.ranks])[0]

    def _ask(self, calls: list[Any]) -> list[Any]:
        """Return all answers. If one fails or times out, kill all ranks: the others would wait for it forever."""
        left, last_progress, timeout = calls, time.monotonic(), self.config.cluster.timeout
        while left:
            ready, left = ray.wait(left, num_returns=len(left), timeout=TICK)
            for call in ready:
                self._check(call, calls)
            if left and self._is_waiting():  # the timeout starts when the cluster has room
                last_progress = time.monotonic()
            if left and time.monotonic() - last_progress > timeout:
                self.close()
                raise LearnerLost(f"a learner did not answer for {timeout:g} s (cluster.timeout)")
        return ray.get(calls)

    def _is_waiting(self) -> bool:
        """Return whether a rank cannot start because the cluster lacks resources, and report which."""
        lacking = self.missing()
        if lacking is not None and lacking != self.waiting_for:
            self.on_event("waiting", f"learners wait for {lacking}")
        self.waiting_for = lacking
        if lacking is not None and self.is_stopping():
            raise ClusterLost(f"stopped while waiting for {lacking}")
        return lacking is not None

    def _check(self, call: Any, calls: list[Any]) -> None:
        """Raise the user's mistake, or LearnerLost, if this call failed."""
        try:
            ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, DapoError):
                raise error.cause from None
            self._lose(calls, error)
        except RayError as error:
            self._lose(calls, error)

    def _lose(self, calls: list[Any], error: RayError) -> NoReturn:
        """Kill all ranks and raise LearnerLost. It names the rank that died, not those that failed because of it."""
        ray.wait(calls, num_returns=len(calls), timeout=DEATH_NOTICE)
        for rank, call in enumerate(calls):
            ready, _ = ray.wait([call], timeout=0)
            try:
                ray.get(ready)
            except RayActorError as death:
                self.close()
                raise LearnerLost(f"learner {rank} died: {explain(death)}") from None
            except RayError:
                continue
        self.close()
        raise LearnerLost(f"a learner failed: {explain(error)}") from None
