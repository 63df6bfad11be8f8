"""What every judge can do, whether it is a rule in a worker process, a model on a GPU or somebody's endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from dapo.types import Prompt, Rollout, Score


class Judge(Protocol):
    """Takes the responses to one prompt and promises their scores, in the same order.

    The promise always comes true: a response that cannot be judged gets a Score with its reason, never an exception.
    """

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]: ...

    def close(self) -> None: ...
