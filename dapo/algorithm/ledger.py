"""The ledger: the history of each prompt's groups, used to draw prompts with nothing to learn less often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.types import FLAT, Group

_DOMAIN = 0x1ED6E2  # separates these random numbers from those of the prompt stream


@dataclass(frozen=True, slots=True)
class History:
    """Counts for one prompt. A group is flat when all its judged rollouts are equal, so that nothing can be learned."""

    groups: int = 0
    judged: int = 0  # rollouts
    right: int = 0  # rollouts
    flat_in_a_row: int = 0  # groups, since the last one that was not flat

    @property
    def pass_rate(self) -> float | None:
        return self.right / self.judged if self.judged else None


class Ledger:
    """Decides which prompts to draw: each flat group in a row halves a prompt's chance.

    A fraction `explore` of the draws ignores the history. So every prompt can come back, and drawing always ends.
    Whether a draw explores depends only on the seed and on the number of prompts considered before it.
    """

    def __init__(self, explore: float, seed: int) -> None:
        self.explore = explore
        self.seed = seed
        self.considered = 0  # prompts considered so far in this run; the counter of the random numbers
        self.histories: dict[str, History] = {}

    def admits(self, uid: str) -> bool:
        """Decide at random whether to draw this prompt. Every call uses a new random number."""
        exploring, chance = np.random.default_rng((self.seed, _DOMAIN, self.considered)).random(2)
        self.considered += 1
        return bool(exploring < self.explore or chance < 0.5 ** self.history(uid).flat_in_a_row)

    def history(self, uid: str) -> History:
        return self.histories.get(uid, History())

    def record(self, group: Group) -> None:
        """Add a decided group to its prompt's history. Unjudged and untrainable groups say nothing and are ignored."""
        judged = [score for score in group.scores if score.judged]
        # With the filter off, a flat group is kept, and all its advantages are 0.
        is_flat = group.verdict in FLAT or (group.kept and not group.advantages.any())
        if not is_flat and not group.kept:
            return
        previous = self.history(group.prompt.uid)
        self.histories[group.prompt.uid] = History(
            groups=previous.groups + 1,
            judged=previous.judged + len(judged),
            right=previous.right + sum(score.acc is True for score in judged),
            flat_in_a_row=previous.flat_in_a_row + 1 if is_flat else 0,
        )

    def state(self) -> dict[str, Sequence[int]]:
        """Return the counts of every prompt as (groups, judged, right, flat_in_a_row), for the checkpoint."""
        return {uid: (h.groups, h.judged, h.right, h.flat_in_a_row) for uid, h in self.histories.items()}

    def restore(self, state: Mapping[str, Sequence[int]], considered: int) -> None:
        self.histories = {uid: History(*counts) for uid, counts in state.items()}
        self.considered = considered
