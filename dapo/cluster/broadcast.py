"""Weight transfer from the learners' GPUs directly to vLLM's: data by vLLM's NCCL transfer, calls by Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from dapo.cluster.supervisor import explain
from dapo.engine.vllm.engine import nccl_sender


class Broadcast:
    """One learner rank's side of the transfer to `workers`, each with `size` GPUs. Only learner rank 0 sends data."""

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        workers: Sequence[Any],
        size: int,
        address: str,
        rank: int,
    ) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.client = _Workers(workers, size)
        # The NCCL group: rank 0 is the sender, followed by every GPU of every worker.
        self.sender = nccl_sender(weights, self.client, host, int(port), 1 + size * len(workers), rank)

    def send(self, version: int) -> None:
        self.client.version = version
        self.sender.send_weights()


class _Workers:
    """The client that vLLM's trainer side expects: it forwards each of the four calls to every rollout worker."""

    def __init__(self, actors: Sequence[Any], size: int) -> None:
        self.actors, self.size, self.version = actors, size, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = [1 + slot * self.size for slot in range(len(self.actors))]  # rank 0 is the sender
        self._all("init_weight_transfer_engine", [init_info | {"rank_offset": offset} for offset in offsets])

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [update_info] * len(self.actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")

    def _all(self, call: str, arguments: Sequence[Any] | None = None) -> None:
        each = [(argument,) for argument in arguments] if arguments else [()] * len(self.actors)
        left = [
            actor.call.remote("receive", call, *own, version=self.version)
            for actor, own in zip(self.actors, each, strict=True)
        ]
        while left:
            ready, left = ray.wait(left)
            try:
                ray.get(ready)
            except RayError as error:
                # The collective waits for the lost worker forever, here and in all other workers. It cannot
                # be aborted, so this learner exits: the driver then restarts the learners from the newest checkpoint,
                # and replaces all workers.
                print(f"a rollout worker was lost while it received weights: {explain(error)}", file=sys.stderr)
                os._exit(1)
