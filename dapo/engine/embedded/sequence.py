"""The records that engine and decoder share, and the protocol of a decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dapo.engine.stop import StopStrings
from dapo.types import FinishReason, Request, SamplingParams


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """A prompt with unfinished responses."""

    tokens: tuple[int, ...]
    users: int = 0  # unfinished responses
    cached: Any = None  # what the decoder keeps of a prefilled prompt; None before

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(eq=False, slots=True)
class Response:
    """One response that is waiting or being decoded."""

    request: Request
    prompt: SharedPrompt
    index: int
    key: int  # identifies its random numbers
    stop: StopStrings | None = None
    version: int = 0  # of the weights that drew its first token
    switches: list[int] = field(default_factory=list)  # [i]: tokens drawn when the weights advanced the i-th time
    tokens: list[int] | np.ndarray = field(default_factory=list)
    logprobs: list[float] | np.ndarray = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)  # spans of tokens that an environment gave
    fixed: int = 0  # tokens of earlier turns and given ones, which a restart must keep
    limit: int = 0  # greatest number of tokens, given ones included

    @property
    def turn_start(self) -> int:
        return self.given[-1][1] if self.given else 0

    def restart(self) -> None:
        """Forget what was drawn in this turn."""
        self.tokens, self.logprobs = self.tokens[: self.fixed], self.logprobs[: self.fixed]
        self.switches = [switch for switch in self.switches if switch < self.fixed]


Finished = tuple[Response, FinishReason]


def drawing(params: SamplingParams) -> SamplingParams:
    """Return what the responses of one batch must have in common: how a token is drawn, not where a response ends."""
    return replace(params, max_tokens=1, stop=())


class Decoder(Protocol):
    """Decodes a batch of responses."""

    burst: int  # decode steps of one `advance`, at most

    @property
    def active(self) -> Collection[Response]: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def working_bytes(self) -> int: ...

    @property
    def parked(self) -> Collection[Response]:
        """The finished episodes whose cache is kept. It may be given up at any time, and is then computed again."""
        ...

    def unpark(self, responses: Iterable[Response]) -> None:
        """Give up the cache of finished episodes, where it is kept."""
        ...

    def suspend(self) -> None:
        """Free the cache's memory until it is needed again. Called only when nothing is active."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Compile kernels and capture CUDA graphs for all batch sizes with these parameters."""
        ...

    def room(self, waiting: Iterable[Response]) -> int:
        """Return how many of the waiting responses, from the front, can start now."""
        ...

    def start(self, newcomers: Sequence[Response]) -> list[Finished]:
        """Add responses to the batch. Called after every `advance`, even without newcomers.

        For an episode that goes on, compute those of its fixed tokens that are not in a kept cache.
        """
        ...

    def advance(self) -> list[Finished]:
        """Draw more tokens for every active response. Returns those that finished, which are no longer active."""
        ...

    def wait(self) -> None:
        """Wait for the steps in flight, so that `tokens_drawn` is exact."""
        ...

    def tokens_drawn(self, response: Response) -> int:
        """Return the number of tokens that an active response has."""
        ...

    def remove(self, responses: Sequence[Response]) -> None:
        """Take active responses out of the batch and free their cache."""
        ...

    def free_prompt(self, prompt: SharedPrompt) -> None:
        """Free the cache of a prompt that has no users left."""
        ...

    def take_preempted(self) -> list[Response]:
        """Return the responses preempted since the last call, which must start again."""
        ...

    def release_idle(self) -> None:
        """Free what is not needed while nothing is active or waiting."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of how busy the decoder was since the last call."""
        ...
