"""The protocol of every engine: groups go in, and rollouts come out as they finish."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from dapo.types import Extension, Request, Rollout


class Engine(Protocol):
    @property
    def is_repeatable(self) -> bool:
        """Whether the same calls in the same order give the same bits."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue groups to sample. Returns at once."""
        ...

    def poll(self, *, wait: bool = True) -> list[Rollout]:
        """Return the rollouts that finished since the last call. Waits for one; empty only if nothing is in flight.

        With `wait` False, it returns after a few decode steps even if nothing has finished. A rollout of an episode
        (`Request.turns`) that has finished is parked: it is not in flight, and its cache is kept if there is room.
        """
        ...

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Append given tokens to parked episodes and sample their next turns, which `poll` returns with all tokens.

        Only the tokens that are not in the cache are computed. Random numbers continue by position.
        """
        ...

    def end(self, episodes: Iterable[tuple[int, int]]) -> None:
        """Forget parked episodes, given by group serial and sample index."""
        ...

    def cancel(self, serials: Iterable[int]) -> int:
        """Drop the unfinished and the parked rollouts of these groups. Returns how many tokens they had generated."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample from this version of the policy's weights from now on. Rollouts in flight continue with them."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes on the learner's GPU that `suspend` gives back."""
        ...

    def suspend(self) -> None:
        """Give the cache's memory back, also that of parked episodes. Only if nothing is in flight.

        The next `submit`, `extend` or `sync_weights` resumes the engine.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of how busy the engine was since the last call."""
        ...

    def close(self) -> None: ...
