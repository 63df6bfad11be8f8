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
    Prompts that are not promising are drawn only to explore, with probability explore / lookahead. Whether a draw
    explores depends only on the seed and on the number of decisions before it.
    """

    def __init__(self, explore: float, seed: int, lookahead: int = 1) -> None:
        self.explore = explore
        self.lookahead = lookahead  # prompts per promising one
        self.seed = seed
        self.considered = 0  # decisions so far in this run; the counter of the random numbers
        self.histories: dict[str, History] = {}

    def admits(self, uid: str, *, is_promising: bool = True) -> bool:
        """Decide at random whether to draw this prompt. Every call uses a new random number."""
        exploring, luck = self._random()
        if not is_promising:
            return bool(exploring < self.explore / self.lookahead)
        return bool(exploring < self.explore or luck < 0.5 ** self.history(uid).flat_in_a_row)

    def chance(self, uid: str) -> float:
        """Return the probability with which `admits` is true now for a promising prompt."""
        return self.explore + (1 - self.explore) * 0.5 ** self.history(uid).flat_in_a_row

    def is_worth_a_visit(self, uid: str) -> bool:
        """Decide at random whether to visit a prompt again: the nearer its pass rate is to one half, the likelier."""
        history = self.history(uid)
        rate = history.pass_rate or 0.0
        if history.flat_in_a_row:
            return False
        # Without right and wrong the rate is 0: the scores differ, and that is all there is to know.
        return rate in (0.0, 1.0) or bool(self._random()[0] < (4 * rate * (1 - rate)) ** 2)

    def _random(self) -> np.ndarray:
        """Return two random numbers that depend only on the seed and on the number of calls so far."""
        numbers = np.random.default_rng((self.seed, _DOMAIN, self.considered)).random(2)
        self.considered += 1
        return numbers

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

    def weights(self, groups: Sequence[Group], sizes: Sequence[int]) -> np.ndarray:
        """Return weights for a batch that undo what the ledger did to the mix of prompts.

        They are proportional to 1 / chance of each group's prompt, and keep the size of the batch:
        sum w_g size_g = sum size_g. The weighted mean then estimates the mean over prompts drawn without the ledger.
        """
        inverse = np.array([1 / group.chance for group in groups])
        return inverse * (np.sum(sizes) / np.dot(inverse, sizes)) if np.any(sizes) else inverse

    def state(self) -> dict[str, Sequence[int]]:
        """Return the counts of every prompt as (groups, judged, right, flat_in_a_row), for the checkpoint."""
        return {uid: (h.groups, h.judged, h.right, h.flat_in_a_row) for uid, h in self.histories.items()}

    def restore(self, state: Mapping[str, Sequence[int]], considered: int) -> None:
        self.histories = {uid: History(*counts) for uid, counts in state.items()}
        self.considered = considered
