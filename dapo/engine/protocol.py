"""The protocol of every engine: groups go in, and rollouts come out as they finish."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from dapo.types import Request, Rollout


class Engine(Protocol):
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue groups to sample. Returns at once."""
        ...

    def poll(self) -> list[Rollout]:
        """Return the rollouts that finished since the last call. Waits for one; empty only if nothing is in flight."""
        ...

    def cancel(self, serials: Iterable[int]) -> int:
        """Drop the unfinished rollouts of these groups. Returns the number of tokens that they had generated."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample from this version of the policy's weights from now on. Rollouts in flight continue with them."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes on the learner's GPU that `suspend` gives back."""
        ...

    def suspend(self) -> None:
        """Give the cache's memory back, so that an update can use it. Only if nothing is in flight.

        The next `submit` or `sync_weights` resumes the engine.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of how busy the engine was since the last call."""
        ...

    def close(self) -> None: ...
