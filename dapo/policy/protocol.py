"""What the trainer asks of whatever learns: one process with all weights, or many that share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from dapo.types import Group, TokenStats


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    metrics: dict[str, float]
    token_stats: dict[tuple[int, int], TokenStats]
    stop: str | None = None  # why the run cannot go on, if it cannot
    notes: tuple[str, ...] = ()  # what a person should know of it


class Learner(Protocol):
    @property
    def non_finite_in_a_row(self) -> int:
        """Optimizer steps that were left out, up to now."""
        ...

    @non_finite_in_a_row.setter
    def non_finite_in_a_row(self, value: int) -> None: ...

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        """All mini-batches and epochs over one batch of groups that `version` of the weights is about to learn from."""
        ...

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        """Per group the reference's log-probabilities of every rollout's tokens."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as they are now, one by one, under the names and in the precision of the saved model."""
        ...

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        """The share of the GPU's peak rate that the update's operations took; empty where the peak is not known."""
        ...

    @property
    def needs_cache(self) -> bool:
        """Whether an update can only be computed in the memory of the sampler's cache."""
        ...

    def memory_plan(self, cache_bytes: int) -> str | None:
        """What a GPU's memory will hold, in words; None where there is no GPU."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint of these weights and their optimizer takes on disk, about."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into a checkpoint that is being made."""
        ...

    def restore(self, folder: Path) -> None:
        """Take over a checkpoint's optimizer and adapters; all other weights were loaded from there to start with."""
        ...
