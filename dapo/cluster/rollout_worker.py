"""The Ray actor that samples, the budget of restarts, and one-line reasons for the loss of an actor."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo.engine.protocol import Engine
from dapo.errors import ClusterLost, DapoError
from dapo.types import Request, Rollout

Weights = Mapping[str, Any]  # from `dapo.engine.packed`: arrays in memory that all processes of a node share
Build = Callable[[Callable[[], Weights]], Engine]


class RolloutWorker:
    """Ray actor that holds one engine, and the weights that it will sample from next."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.weights: Weights = {}

    def open(self) -> int:
        """Build the engine and return the process id.

        Not part of the constructor: Ray reports an exception there as the death of the actor and loses its type.
        """
        self.engine = self.build(lambda: self.weights)
        return os.getpid()

    def step(self, requests: Sequence[Request], versions: Sequence[int], weights: Weights | None) -> list[Rollout]:
        """Apply new weights, accept requests, and decode until at least one response is finished."""
        if weights is not None:
            self.weights = weights
        for version in versions:
            self.engine.sync_weights(version)
        self.weights = {}  # drop the reference, so that Ray can free the shared memory
        if requests:
            self.engine.submit(requests)
        return self.engine.poll()

    def ping(self) -> list[Rollout]:
        """Return no rollouts, so that the answer can be handled like that of `step`."""
        return []

    def receive(self, call: str, *arguments: Any, version: int) -> None:
        """Run one call of the NCCL weight transfer, in which a learner sends directly to this worker's GPUs."""
        self.engine.receive(call, *arguments, version=version)  # pyright: ignore[reportAttributeAccessIssue]

    def cancel(self, serials: Sequence[int]) -> int:
        return self.engine.cancel(serials)

    def figures(self) -> dict[str, float]:
        return self.engine.figures()

    def release_cache(self) -> None:
        self.engine.release_cache()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self.engine.close()


class Restarts:
    """Budget of lost processes for the whole run, shared by learners, engine and judges."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        self.lock = threading.Lock()  # engine and judges spend it from their own threads

    def spend(self, reason: str) -> None:
        """Count one loss. Raise ClusterLost if it exceeds the limit."""
        with self.lock:
            self.spent += 1
            is_exceeded = self.spent > self.limit
        if is_exceeded:
            raise ClusterLost(
                f"{reason}; the run has lost more processes than cluster.max_restarts = {self.limit} allows"
            )


def explain(error: BaseException) -> str:
    """Return the one line of a Ray error that gives the reason.

    The advice after "; " in our own errors is dropped: it is meant for a run with a single engine.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, DapoError):
        return str(cause).partition("; ")[0]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if "raised in its creation task" in text:
        return f"its constructor failed: {text.splitlines()[-1]}"
    found = re.search(r"because (.+?)(?:\.\s|\.?$)", text, re.MULTILINE)
    return found[1] if found else text.splitlines()[-1]
