"""A rollout worker as Ray runs it, and what there is to say when one is lost."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo.engine.protocol import Engine
from dapo.errors import ClusterLost, DapoError
from dapo.types import Request, Rollout

Weights = Mapping[str, Any]  # as `dapo.engine.packed` makes them: arrays that processes of one node share
Build = Callable[[Callable[[], Weights]], Engine]


class RolloutWorker:
    """The actor: an engine, and the weights that it is to sample from next."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.weights: Weights = {}

    def open(self) -> int:
        """Apart from the constructor, so that what is wrong comes back as an error and not as a death."""
        self.engine = self.build(lambda: self.weights)
        return os.getpid()

    def step(self, requests: Sequence[Request], versions: Sequence[int], weights: Weights | None) -> list[Rollout]:
        """Take these in, and go on until something is finished."""
        if weights is not None:
            self.weights = weights
        for version in versions:
            self.engine.sync_weights(version)
        self.weights = {}  # the memory that they share can be given back
        if requests:
            self.engine.submit(requests)
        return self.engine.poll()

    def is_there(self) -> list[Rollout]:
        """Nothing is finished by it."""
        return []

    def receive(self, call: str, *arguments: Any, version: int) -> None:
        """From a learner, which sends weights straight to this worker's GPUs."""
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
    """Counts what was lost, in the whole run, and says when it is enough."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        self.lock = threading.Lock()  # learners, engine and judge each have their own thread

    def spend(self, story: str) -> None:
        with self.lock:
            self.spent += 1
            is_enough = self.spent > self.limit
        if is_enough:
            raise ClusterLost(f"{story}; that is more than cluster.max_restarts = {self.limit} times")


def explain(error: BaseException) -> str:
    """Ray's messages run over many lines; one of them says why. What an engine advises is not for a worker of many."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, DapoError):
        return str(cause).partition("; ")[0]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if "raised in its creation task" in text:
        return f"it could not be made: {text.splitlines()[-1]}"
    found = re.search(r"because (.+?)(?:\.\s|\.?$)", text, re.MULTILINE)
    return found[1] if found else text.splitlines()[-1]
