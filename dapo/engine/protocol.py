"""What every engine offers: groups go in, finished rollouts come out as they finish."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from dapo.types import Request, Rollout


class Engine(Protocol):
    def submit(self, requests: Sequence[Request]) -> None: ...

    def poll(self) -> list[Rollout]:
        """What finished since the last call; empty only when nothing is left to do."""
        ...

    def cancel(self, serials: Iterable[int]) -> int:
        """Forget these groups' unfinished rollouts; returns the number of tokens they had generated."""
        ...

    def sync_weights(self, version: int) -> None:
        """From now on sample from the policy's weights of this version. What is in flight goes on with them."""
        ...

    def figures(self) -> dict[str, float]:
        """How busy the engine was since the last call, by metric name."""
        ...

    def close(self) -> None: ...
