"""Learners on Ray: each actor is one FSDP rank, and if one is lost all are restarted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError

from dapo.cluster.remote_learner import LearnerRank
from dapo.cluster.supervisor import Rules, Supervisor, Worker, explain
from dapo.config import Config
from dapo.config.functions import CustomParts
from dapo.engine.packed import packed
from dapo.errors import LearnerLost
from dapo.model.loading import resolve_device
from dapo.policy.build import build_policy
from dapo.policy.protocol import UpdateResult
from dapo.policy.sharding import backend
from dapo.types import Group

DEATH_NOTICE = 3.0  # seconds to wait for Ray's report of which rank died; the other ranks fail because of it


class RayLearnerRank(LearnerRank):
    """The Ray actor of one rank. `shares_gpu`: an engine uses the same GPU, in turns."""

    def __init__(self, rank: int, world: int, *, shares_gpu: bool) -> None:
        self.rank, self.world, self.shares_gpu = rank, world, shares_gpu

    def address(self) -> str:
        """Return an address on this node, with a free port, for the ranks to rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def open(
        self, options: str, saved: Path | None, address: str, custom: CustomParts | None
    ) -> tuple[frozenset[int], bool]:
        """Join the process group and load the model. Return its stop tokens, and whether it is on a GPU."""
        config = Config.model_validate_json(options)
        self.on_gpu = resolve_device(config.model.device).type == "cuda"
        if self.world > 1:
            dist.init_process_group(
                backend(self.on_gpu),
                init_method=address,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=config.cluster.timeout),
            )
        loaded, self.policy = build_policy(config, saved, custom)
        return loaded.stop_ids, self.on_gpu

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        return getattr(self, name)(*arguments)

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult | None:
        result = super().update(groups, step, version)
        if self.needs_engine_memory():  # the engine on the same GPU cannot use memory that PyTorch caches
            torch.cuda.empty_cache()
        return result

    def needs_engine_memory(self) -> bool:
        return self.shares_gpu and self.on_gpu

    def connect(self, workers: Sequence[Any], size: int, address: str) -> None:
        """Prepare to send weights to these rollout workers, each with `size` GPUs."""
        from dapo.cluster.broadcast import Broadcast  # needs vLLM, which is an optional dependency

        self.broadcast = Broadcast(self.policy.weights, workers, size, address, self.rank)

    def send_weights(self, version: int) -> None:
        self.broadcast.send(version)

    def packed_weights(self) -> tuple[bool, Any]:
        """Gather the weights on rank 0. Returns two values: the caller waits for the first without fetching the second.

        Gathering is a collective, so the other ranks must iterate as well.
        """
        if self.rank == 0:
            return True, packed(self.policy.weights())
        for _ in self.policy.weights():
            pass
        return True, None


class RayRanks(Supervisor[Worker]):
    """Transport to `count` ranks that `start(rank)` creates.

    When one rank is lost, all are killed and `LearnerLost` is raised; the caller then calls `restart`.
    """

    role = "learner"
    in_background = False  # no thread: the caller waits for every call anyway

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        config: Config,
        saved: Path | None,
        rules: Rules,
        custom: CustomParts | None = None,
    ) -> None:
        super().__init__(rules)
        self.start, self.count, self.config = start, count, config
        self.custom = custom  # passed to the ranks as objects
        self.on_gpu = False
        self.stop_ids: frozenset[int] = frozenset()
        self._open(saved)

    def restart(self, lost: LearnerLost, saved: Path | None) -> None:
        """Start all ranks again from this checkpoint, or from the initial model if it is None."""
        self.restarts.spend(str(lost))
        try:
            self._open(saved)
        except LearnerLost as again:
            self.restart(again, saved)

    def call(self, name: str, *arguments: Any) -> Any:
        if not self.workers:
            raise LearnerLost("the learners have ended")
        stored = ray.put(arguments)  # once for all ranks
        return self._answers([rank.actor.call.remote(name, stored) for rank in self.workers])[0]

    def stored_weights(self) -> Any:
        """Return the reference of the weights in Ray's object store. The driver never holds the weights itself."""
        calls = [rank.actor.packed_weights.options(num_returns=2).remote() for rank in self.workers]
        self._answers([done for done, _ in calls])
        return calls[0][1]

    def broadcast(self, workers: Sequence[Any], version: int) -> None:
        """Send the weights from the first learner's GPU directly to the GPUs of these workers."""
        if workers != self.connected:
            (address,) = self._answers([self.workers[0].actor.address.remote()])
            self.call("connect", workers, self.config.rollout.tensor_parallel, address)
            self.connected = workers
        self.call("send_weights", version)

    def _open(self, saved: Path | None) -> None:
        self.connected: Sequence[Any] = ()  # rollout workers in the current NCCL group
        self.saved = saved.absolute() if saved else None
        self._open_all(self.count, "Loading the model in")

    def _start(self, slot: int) -> tuple[Worker, Any]:
        actor = self.start(slot)
        if slot == 0:
            self.address = actor.address.remote()  # a reference, which Ray resolves for each rank
        options = self.config.model_dump_json()
        return Worker(slot, actor), actor.open.remote(options, self.saved, self.address, self.custom)

    def _opened(self, worker: Worker, answer: tuple[frozenset[int], bool]) -> None:
        worker.is_open = True
        self.stop_ids, self.on_gpu = answer

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for one call of each rank, and return the answers."""
        found: dict[int, Any] = {}
        for rank, call in zip(self.workers, calls, strict=False):
            self._call(rank, call, partial(found.__setitem__, rank.slot))
        try:
            self._wait(lambda: len(found) == len(calls))
        finally:
            for rank in self.workers:  # after one rank has reported a mistake, the others need not report it again
                rank.calls.clear()
        return [found[slot] for slot in range(len(calls))]

    def _lose(self, worker: Worker, what: str) -> None:
        """Kill all ranks and raise LearnerLost. It names the rank that died, not those that failed because of it."""
        who = f"learner {worker.slot}" if what.startswith("died") else "a learner"
        calls = {call: rank.slot for rank in self.workers for call in rank.calls} if what.startswith("failed") else {}
        if calls:
            ray.wait([*calls], num_returns=len(calls), timeout=DEATH_NOTICE)
        for call, slot in calls.items():
            try:
                ray.get(call, timeout=0)
            except RayActorError as death:
                who, what = f"learner {slot}", f"died: {explain(death)}"
                break
            except RayError:
                continue
        self.close()
        raise LearnerLost(f"{who} {what}") from None
