"""An endless, resumable stream of prompts from several sources, mixed by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from dapo.errors import CheckpointError, DataError
from dapo.types import Prompt


class PromptSource(Protocol):
    """One source of a stream. The prompt drawn at a position depends only on the position."""

    def draw(self, position: int) -> Prompt: ...

    def identity(self) -> str:
        """Return text that identifies the data that positions index into."""
        ...

    def questions(self) -> list[Prompt]:
        """Return all prompts, in the order of the files. Raise DataError for an endless source."""
        ...

    def columns(self) -> set[str]:
        """Return the names of the extra columns that some of its prompts have."""
        ...

    def has_answers(self) -> bool:
        """Return whether some of its prompts have a gold answer, or a task that scores responses itself."""
        ...


class ShuffledSource:
    """A finite dataset, shuffled again for each epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, index: int = 0) -> None:
        self.prompts = prompts
        self._seed = (seed, index)  # with the source's index, so that two sources of one size differ in order
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

    def columns(self) -> set[str]:
        return set().union(*(prompt.extra for prompt in self.prompts))

    def has_answers(self) -> bool:
        return any_answers(self.prompts)


def any_answers(prompts: Iterable[Prompt]) -> bool:
    return any(prompt.answer is not None or "gym" in prompt.extra for prompt in prompts)


class PromptStream:
    """Draws from several sources by weight.

    The n-th prompt depends only on the seed and n. So the positions are the whole state, and are all that a checkpoint
    needs.
    """

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float] = (1.0,), notes: Sequence[str] = ()
    ) -> None:
        assert len(sources) == len(weights) > 0
        self.sources = tuple(sources)
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.notes = tuple(notes)  # messages for the user: how many rows were left out, and why
        self.positions = [0] * len(sources)  # prompts drawn so far from each source

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def peek(self, count: int) -> list[Prompt]:
        """Return the prompts that the next draws will give, without drawing them."""
        positions = list(self.positions)
        try:
            return self.take(count)
        finally:
            self.positions = positions

    def skip(self) -> None:
        """Advance past the next prompt, which `peek` has returned."""
        self.positions[self._next_source()] += 1

    def restore(self, positions: Sequence[int], digest: str) -> None:
        """Continue at the positions of a checkpoint; refuse if the data changed since, which gives them no meaning."""
        if digest != self.digest:
            raise CheckpointError(
                "data.train: the questions are not those that the run was trained on so far; restore them, or "
                "choose another run.name"
            )
        self.positions = list(positions)

    @cached_property
    def size(self) -> int | None:
        """The number of questions; None if a source is endless."""
        try:
            return sum(len(source.questions()) for source in self.sources)
        except DataError:
            return None

    @property
    def epochs(self) -> float | None:
        """Passes over the questions so far, by the number of prompts drawn; None if a source is endless."""
        return sum(self.positions) / self.size if self.size else None

    @cached_property
    def digest(self) -> str:
        """Identifies the data that the positions index into, to refuse resuming with another dataset."""
        identities = "\n".join(source.identity() for source in self.sources)
        return hashlib.blake2b(identities.encode(), digest_size=16).hexdigest()

    def questions(self) -> list[Prompt]:
        return [prompt for source in self.sources for prompt in source.questions()]

    def columns(self) -> set[str]:
        return set().union(*(source.columns() for source in self.sources))

    def has_answers(self) -> bool:
        return any(source.has_answers() for source in self.sources)

    def _next(self) -> Prompt:
        source = self._next_source()
        prompt = self.sources[source].draw(self.positions[source])
        self.positions[source] += 1
        return prompt

    def _next_source(self) -> int:
        """Return the index of the source that is furthest behind its share; the first one if several are."""
        draws = sum(self.positions)
        behind = [share * draws - drawn for share, drawn in zip(self.shares, self.positions, strict=True)]
        return behind.index(max(behind))
