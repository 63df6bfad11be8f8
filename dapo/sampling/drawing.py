"""Draw prompts for new groups: new ones from the stream, thinned by the ledger, and earlier kept ones again."""

from __future__ import annotations

from collections import deque

from dapo.algorithm.ledger import Ledger
from dapo.checkpoint.state import DrawerState
from dapo.config import Config
from dapo.data.stream import PromptStream
from dapo.types import Drawn, Group, Prompt

MIN_BATCHES = 8  # a prompt is drawn again only after this many batches of other kept groups


class PromptDrawer:
    """Draws prompts from the stream as the ledger admits them; a share `algorithm.ledger.revisit` are revisits.

    A prompt whose group was kept is likely to be kept again, while new prompts are kept less often as the model
    improves. The prompt that was drawn longest ago is revisited first, so that its visits are far apart.
    """

    def __init__(self, config: Config, stream: PromptStream) -> None:
        options = config.algorithm.ledger
        self.stream = stream
        self.uses_ledger, self.share = options.enable, options.revisit
        self.ledger = Ledger(options.explore, config.run.seed)
        self.least_known = MIN_BATCHES * config.data.train_batch_size
        self.known: deque[Prompt] = deque()  # prompts whose latest group was kept, longest ago first
        self.drawn = self.revisited = 0  # prompts drawn so far, and how many of them were revisits
        self.skipped = 0  # prompts that the ledger did not admit, since `take_skipped`

    def draw(self, count: int) -> list[Drawn]:
        return [self._revisit() or self._next() for _ in range(count)]

    def record(self, group: Group) -> None:
        """Record the outcome of a group, and remember its prompt for a revisit if there is more to learn from it."""
        self.ledger.record(group)
        if self.share > 0 and group.kept:
            self.known.append(group.prompt)

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped

    def state(self) -> DrawerState:
        return DrawerState(
            positions=list(self.stream.positions),
            data_digest=self.stream.digest,
            considered=self.ledger.considered,
            ledger=self.ledger.state(),
            known=list(self.known),
            drawn=self.drawn,
            revisited=self.revisited,
        )

    def restore(self, state: DrawerState) -> None:
        self.stream.restore(state.positions, state.data_digest)
        self.ledger.restore(state.ledger, state.considered)
        self.known = deque(state.known)
        self.drawn, self.revisited = state.drawn, state.revisited

    def _revisit(self) -> Drawn | None:
        """Return a prompt to revisit, or None if no revisit is due or no prompt is worth one."""
        if self.revisited >= self.share * self.drawn:
            return None
        for _ in range(len(self.known) - self.least_known):
            prompt = self.known.popleft()
            if self.ledger.is_worth_a_visit(prompt.uid):
                self.drawn += 1
                self.revisited += 1
                return Drawn(prompt)
            self.known.insert(len(self.known) - self.least_known, prompt)  # in front of those visited too recently
        return None

    def _next(self) -> Drawn:
        """Return the next prompt of the stream that the ledger admits."""
        self.drawn += 1
        while True:
            (prompt,) = self.stream.take(1)
            if not self.uses_ledger:
                return Drawn(prompt)
            chance = self.ledger.chance(prompt.uid)
            if self.ledger.admits(prompt.uid):
                return Drawn(prompt, chance)
            self.skipped += 1
