"""Drawing prompts for new groups: the next ones of the stream, thinned by the ledger, and known ones again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dapo.algorithm.ledger import Ledger
from dapo.config import Config
from dapo.data.stream import PromptStream
from dapo.types import Group, Prompt

# A prompt is visited again after the prompts of this many other batches, and forgotten after those of so many more.
MIN_BATCHES, MAX_BATCHES = 8, 64


class Drawn(NamedTuple):
    prompt: Prompt
    chance: float = 1.0  # the probability with which the ledger let it pass


class PromptDrawer:
    """Draws from the stream what the ledger admits, and a share `algorithm.ledger.revisit` from earlier kept prompts.

    A group that was kept once is likely to be kept again, while a new prompt's chance falls as the model improves.
    Revisits go from the oldest to the newest, so that the visits of a prompt are far apart.
    """

    def __init__(self, config: Config, stream: PromptStream) -> None:
        options = config.algorithm.ledger
        self.stream = stream
        self.is_thinned = options.enable
        self.share = options.revisit
        self.ledger = Ledger(options.explore, config.run.seed)
        self.wait = MIN_BATCHES * config.data.train_batch_size
        self.known: deque[Prompt] = deque(maxlen=MAX_BATCHES * config.data.train_batch_size)  # kept, oldest first
        self.drawn = self.revisited = 0
        self.skipped = 0  # prompts of the stream that the ledger did not admit, since `take_skipped`

    def draw(self, count: int) -> list[Drawn]:
        return [self._revisit() or self._next() for _ in range(count)]

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped

    def record(self, group: Group) -> None:
        """Remember the result of a decided group, and its prompt if there is more to learn from it."""
        self.ledger.record(group)
        if self.share > 0 and group.kept:
            self.known.append(group.prompt)

    def restore(
        self, considered: int, ledger: Mapping[str, Sequence[int]], known: Sequence[Prompt], drawn: Sequence[int]
    ) -> None:
        self.ledger.restore(ledger, considered)
        self.known = deque(known, self.known.maxlen)
        self.drawn, self.revisited = drawn

    def _revisit(self) -> Drawn | None:
        """Return the oldest known prompt that is worth another visit, or None if it is the stream's turn."""
        while self.revisited < self.share * self.drawn and len(self.known) > self.wait:
            prompt = self.known.popleft()
            if self.ledger.is_worth_a_visit(prompt.uid):
                self.drawn += 1
                self.revisited += 1
                return Drawn(prompt)
        return None

    def _next(self) -> Drawn:
        self.drawn += 1
        while True:
            (prompt,) = self.stream.take(1)
            if not self.is_thinned:
                return Drawn(prompt)
            chance = self.ledger.chance(prompt.uid)
            if self.ledger.admits(prompt.uid):
                return Drawn(prompt, chance)
            self.skipped += 1
