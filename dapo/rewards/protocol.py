"""The judge protocol, shared by rules in worker processes, reward models and endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from dapo.types import Prompt, Rollout, Score


class Judge(Protocol):
    """Takes the responses to one prompt and returns a future with their scores, in the same order.

    A response that cannot be judged gets a Score with the reason. `result` raises only what ends the run.
    """

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]: ...

    def close(self) -> None: ...
