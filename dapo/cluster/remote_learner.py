"""The learner protocol over several ranks: the policy of each rank, and the learner that commands all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dapo.policy.policy import Policy
from dapo.policy.protocol import UpdateResult
from dapo.system.tensors import TensorFiles
from dapo.types import EventKind, Group


class LearnerRank:
    """The policy of one rank. Every method is called on all ranks together, with the same arguments."""

    policy: Policy
    batch: Sequence[Group] = ()  # of the last update

    def learn(self, name: str, *arguments: Any) -> Any:
        """Call a method of the policy. Only rank 0 returns its result."""
        answer = getattr(self.policy, name)(*arguments)
        return answer if self.policy.rank == 0 else None

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult | None:
        self.batch = groups
        return self.learn("update", groups, step, version)

    def efficiency(self, update: UpdateResult, seconds: float) -> dict[str, float]:
        return self.policy.efficiency(self.batch, update, seconds)

    def needs_engine_memory(self) -> bool:
        return self.policy.needs_engine_memory

    def get(self, name: str) -> Any:
        return getattr(self.policy, name)

    def set(self, name: str, value: Any) -> None:
        setattr(self.policy, name, value)


class Ranks(Protocol):
    """The transport of calls to all ranks: Ray or torchrun."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Call this method of every rank's `LearnerRank` with these arguments. Return the answer of rank 0."""
        ...


class RemoteLearner:
    """The learner protocol over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        return self.ranks.call("update", groups, step, version)

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        return self.ranks.call("learn", "reference_logprobs", groups)

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        """Return the utilization of the last update. The ranks have its batch, so it is not sent again."""
        return self.ranks.call("efficiency", replace(update, token_stats={}), seconds)

    @property
    def needs_engine_memory(self) -> bool:
        return self.ranks.call("needs_engine_memory")

    def notes(self, cache_bytes: int) -> list[tuple[EventKind, str]]:
        return self.ranks.call("learn", "notes", cache_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        return self.ranks.call("get", "checkpoint_bytes")

    def save(self, folder: Path) -> TensorFiles:
        return self.ranks.call("learn", "save", folder.absolute())

    def restore(self, folder: Path) -> None:
        self.ranks.call("learn", "restore", folder.absolute())

    @property
    def non_finite_in_a_row(self) -> int:
        return self.ranks.call("get", "non_finite_in_a_row")

    @non_finite_in_a_row.setter
    def non_finite_in_a_row(self, value: int) -> None:
        self.ranks.call("set", "non_finite_in_a_row", value)
