"""The reward function of recipes/guess_five.yaml."""

import re


def reward(completion: str, answer: int) -> float:
    """Return 1 for the answer, less for an integer that is further off, and 0 for anything but a single integer."""
    text = completion.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text) or len(text) > 9:
        return 0.0
    return max(0.0, 1 - abs(int(text) - answer) / 9)
