"""The ledger: what each prompt's groups have shown so far, and so which prompts are worth drawing again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.algorithm.filtering import FLAT
from dapo.types import Group

_DOMAIN = 0x1ED6E2  # keeps these random numbers apart from the stream's


@dataclass(frozen=True, slots=True)
class History:
    """Of one prompt: how often it was tried, how often rightly, and how many groups in a row taught nothing."""

    groups: int = 0
    judged: int = 0
    right: int = 0
    flat_in_a_row: int = 0

    @property
    def pass_rate(self) -> float | None:
        return self.right / self.judged if self.judged else None


class Ledger:
    """Passes over prompts that teach nothing: each flat group in a row halves the chance of being drawn.

    A share `explore` of the draws ignores the history, so no prompt is given up for good and no draw can fail for ever.
    Whether a draw explores depends on the seed and on how many prompts were considered before, on nothing else.
    """

    def __init__(self, explore: float, seed: int) -> None:
        self.explore = explore
        self.seed = seed
        self.considered = 0
        self.histories: dict[str, History] = {}

    def admits(self, uid: str) -> bool:
        """Whether the prompt that is up next should be drawn; each call is a new throw of the dice."""
        exploring, chance = np.random.default_rng((self.seed, _DOMAIN, self.considered)).random(2)
        self.considered += 1
        return bool(exploring < self.explore or chance < 0.5 ** self.of(uid).flat_in_a_row)

    def of(self, uid: str) -> History:
        return self.histories.get(uid, History())

    def record(self, group: Group) -> None:
        """Take a decided group into account. One that could not be judged says nothing about its prompt."""
        judged = [score for score in group.scores if score.judged]
        is_flat = group.verdict in FLAT or (group.kept and not group.advantages.any())
        if not is_flat and not group.kept:
            return
        was = self.of(group.prompt.uid)
        self.histories[group.prompt.uid] = History(
            groups=was.groups + 1,
            judged=was.judged + len(judged),
            right=was.right + sum(score.acc is True for score in judged),
            flat_in_a_row=was.flat_in_a_row + 1 if is_flat else 0,
        )

    def state(self) -> dict[str, Sequence[int]]:
        return {
            uid: (known.groups, known.judged, known.right, known.flat_in_a_row) for uid, known in self.histories.items()
        }

    def restore(self, state: Mapping[str, Sequence[int]], considered: int) -> None:
        self.histories = {uid: History(*counts) for uid, counts in state.items()}
        self.considered = considered
