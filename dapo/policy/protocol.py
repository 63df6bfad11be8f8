"""The protocol of a learner: one process with all weights, or several ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dapo.checkpoint.weights import TensorFiles
from dapo.types import EventKind, Group, TokenStats


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """The outcome of one call of `Learner.update`."""

    metrics: dict[str, float]
    token_stats: dict[tuple[int, int], TokenStats]  # by (serial, index)
    updates: int  # optimizer steps made; 0: the weights are unchanged
    computed: int  # tokens that went through the trunk
    pairs: int  # of a query and a key, in one attention head
    stop: str | None = None  # why the run must stop; None: it continues
    notes: tuple[str, ...] = ()  # messages for the user


class Learner(Protocol):
    @property
    def non_finite_in_a_row(self) -> int:
        """Consecutive optimizer steps skipped because a loss or gradient was not finite, up to now."""
        ...

    @non_finite_in_a_row.setter
    def non_finite_in_a_row(self, value: int) -> None: ...

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        """Run all epochs and mini-batches over one batch. `version` is that of the weights before the first update."""
        ...

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        """Return, for each group, the reference's log-probabilities of each rollout's tokens."""
        ...

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        """Return the model FLOPs utilization of the update; empty if the GPU's peak rate is unknown."""
        ...

    @property
    def needs_engine_memory(self) -> bool:
        """Whether an update needs the memory of the sampler's key/value cache."""
        ...

    def notes(self, cache_bytes: int) -> list[tuple[EventKind, str]]:
        """Return what a run says at its start: what the GPU's memory will hold, or how this CPU trains better."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate size on disk of a checkpoint of the weights and the optimizer."""
        ...

    def save(self, folder: Path) -> TensorFiles:
        """Begin a checkpoint in `folder`. Return the tensors that the caller must write, by file.

        Several ranks write all files themselves and return nothing.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Load a checkpoint's optimizer and adapters. All other weights were loaded when the policy was built."""
        ...
