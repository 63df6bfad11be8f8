"""An endless stream of prompts, shuffled anew each epoch from the seed, that can be taken up again at any point."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from dapo.types import Prompt


class PromptStream:
    """The n-th prompt drawn depends on seed and n alone, so that the cursor is its whole state."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, cursor: int = 0) -> None:
        self.prompts = prompts
        self.seed = seed
        self.cursor = cursor
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def digest(self) -> str:
        """Of all prompts in their order: the cursor means nothing in another dataset."""
        return hashlib.blake2b(" ".join(prompt.uid for prompt in self.prompts).encode(), digest_size=16).hexdigest()

    def take(self, count: int) -> list[Prompt]:
        drawn = [self._at(self.cursor + i) for i in range(count)]
        self.cursor += count
        return drawn

    def _at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts))
            self._epoch = epoch
        return self.prompts[self._order[place]]
