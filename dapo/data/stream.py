"""An endless stream of prompts from several sources, mixed by weight, that can be taken up again at any point."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dapo.types import Prompt


class Deck(Protocol):
    """One source of a stream: what is drawn at a position depends on the position alone."""

    def draw(self, position: int) -> Prompt: ...

    def identity(self) -> str:
        """Everything that gives a position its meaning."""
        ...

    def questions(self) -> list[Prompt]: ...


class Shuffled:
    """A finite dataset, shuffled anew each epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, index: int = 0) -> None:
        self.prompts = prompts
        self._seed = (seed, index)  # the place among the sources, so that two of one size differ in their order
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def draw(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng((*self._seed, epoch)).permutation(len(self.prompts))
            self._epoch = epoch
        return self.prompts[self._order[place]]

    def identity(self) -> str:
        return " ".join(prompt.uid for prompt in self.prompts)

    def questions(self) -> list[Prompt]:
        return list(self.prompts)


class PromptStream:
    """The n-th prompt drawn depends on seed and n alone, so that the positions are its whole state."""

    def __init__(self, decks: Sequence[Deck], weights: Sequence[float] = (1.0,), notes: Sequence[str] = ()) -> None:
        assert len(decks) == len(weights) > 0
        self.decks = tuple(decks)
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.notes = tuple(notes)  # what a person should know about the datasets: rows left out, and why
        self.positions = [0] * len(decks)  # draws so far, by source

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def digest(self) -> str:
        """Of everything the positions mean something in: they mean nothing in another dataset."""
        identities = "\n".join(deck.identity() for deck in self.decks)
        return hashlib.blake2b(identities.encode(), digest_size=16).hexdigest()

    def questions(self) -> list[Prompt]:
        return [prompt for deck in self.decks for prompt in deck.questions()]

    def _next(self) -> Prompt:
        """From the source that is furthest behind its share, the first of several."""
        draws = sum(self.positions)
        behind = [share * draws - drawn for share, drawn in zip(self.shares, self.positions, strict=True)]
        source = behind.index(max(behind))
        prompt = self.decks[source].draw(self.positions[source])
        self.positions[source] += 1
        return prompt
