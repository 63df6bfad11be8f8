"""The environment `guess`: find a number from 1 to 16, told after each guess whether it is higher or lower."""

from __future__ import annotations

import re
from typing import Any

from dapo.environments.environment import End
from dapo.errors import EpisodeError

LARGEST = 16
# A turn that ends with its only number: "8", "It is 8.", but not "The number is between 8 and".
_ANSWER = re.compile(r"[^0-9]*([0-9]+)\W*")


class Guess:
    """One game. It begins with the row's prompt, and the row's answer is the number to find.

    The score is 1 if the number is found. Otherwise it is half the share of the other numbers that the guesses ruled
    out, so that a model that never finds a number can learn, too.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        answer = row["answer"]
        if str(answer) not in map(str, range(1, LARGEST + 1)):
            raise EpisodeError(f"the row's answer is {answer!r:.50}; guess needs a whole number from 1 to {LARGEST}")
        self.number, self.low, self.high, self.guesses = int(answer), 1, LARGEST, 0

    def reply(self, text: str) -> str | End:
        self.guesses += 1
        found = _ANSWER.fullmatch(text)
        guess = int(found[1][:9]) if found else 0
        if guess == self.number:
            return End(1.0, acc=True, guesses=self.guesses)
        if not 1 <= guess <= LARGEST:
            hint = "That is no such number." if found else "That is no answer."
        elif guess < self.number:
            hint, self.low = "Higher.", max(self.low, guess + 1)
        else:
            hint, self.high = "Lower.", min(self.high, guess - 1)
        choices = f"between {self.low} and {self.high}" if self.low < self.high else f"{self.low}"
        return f"{hint} The number is {choices}. Answer with one number."

    def cut_off(self) -> End:
        ruled_out = 1 - (self.high - self.low) / (LARGEST - 1)
        return End(0.5 * ruled_out, acc=False, guesses=self.guesses)
