"""The reward of recipes/guess_five.yaml."""

import re


def reward(completion: str, answer: int) -> float:
    """1 for the number itself, less the further off a lone integer is, 0 for anything that is not one."""
    text = completion.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text) or len(text) > 9:
        return 0.0
    return max(0.0, 1 - abs(int(text) - answer) / 9)
