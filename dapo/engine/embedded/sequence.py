"""What scheduler and decoder share: a response in the making, and the prompt that it has in common with others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dapo.types import FinishReason, Request, SamplingParams


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """A prompt in use. `cached` is what the decoder keeps of it once it has been computed."""

    tokens: tuple[int, ...]
    users: int = 0  # unfinished responses to it
    cached: Any = None

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(eq=False, slots=True)
class Response:
    """A response in the making."""

    request: Request
    prompt: SharedPrompt
    index: int
    key: int  # of its random numbers
    version: int = 0  # of the weights that drew its first token
    switches: list[int] = field(default_factory=list)  # tokens it had when the weights changed under it
    tokens: list[int] | np.ndarray = field(default_factory=list)
    logprobs: list[float] | np.ndarray = field(default_factory=list)


Finished = tuple[Response, FinishReason]


class Decoder(Protocol):
    """Draws the tokens of responses side by side."""

    @property
    def active(self) -> Collection[Response]: ...

    @property
    def cache_bytes(self) -> int: ...

    def release_cache(self) -> None:
        """Give its memory back until it is needed again. Nothing is active."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Compile and capture all that drawing with these parameters can need."""
        ...

    def room(self, waiting: Iterable[Response]) -> int:
        """How many of those waiting, from the front, can start now."""
        ...

    def start(self, newcomers: Sequence[Response]) -> list[Finished]: ...

    def advance(self) -> list[Finished]:
        """Some more tokens for every active response; those that finished are no longer active."""
        ...

    def settle(self) -> None:
        """Wait for what is being computed, so that `drawn` is exact."""
        ...

    def drawn(self, response: Response) -> int:
        """Tokens of an active response so far."""
        ...

    def remove(self, responses: Sequence[Response]) -> None: ...

    def forget(self, prompt: SharedPrompt) -> None:
        """Nobody uses this prompt any more."""
        ...

    def displaced(self) -> list[Response]:
        """Responses that had to make room since the last call, and must start again."""
        ...

    def release(self) -> None:
        """Nothing is active or waiting."""
        ...

    def figures(self) -> dict[str, float]:
        """How busy the decoder was since the last call."""
        ...
