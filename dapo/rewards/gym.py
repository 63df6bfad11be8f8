"""The `gym` rule: score an answer with the reasoning-gym task's own scorer, on the item regenerated from its seed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dapo.config import Extraction
from dapo.errors import RewardError
from dapo.rewards.extract import extract as find_answer
from dapo.system.digest import text_digest
from dapo.system.install import install_hint

# Exceptions that a task's scorer raises for malformed answers. Such an answer is wrong. Any other exception makes the
# response unjudged. The table was found by scoring junk with every task.
RAISES_OVER_JUNK: dict[str, tuple[type[Exception], ...]] = {
    "boxnet": (TypeError, AttributeError, KeyError, ValueError),  # JSON that is not the mapping it expects
    "calendar_arithmetic": (OverflowError,),  # a number with hundreds of digits
    "game_of_life": (KeyError,),  # a mapping instead of a list
    "prime_factorization": (ValueError,),  # anything that is not factors
    "time_intervals": (OverflowError,),
}

# Answers that a scorer accepts by mistake: every comparison with the distance to `nan` is false.
NEVER_RIGHT = {"complex_arithmetic": re.compile("nan", re.IGNORECASE)}


def gym_reward(
    completion: str,
    answer: str | None,
    *,
    gym: Mapping[str, Any],
    threshold: float = 1.0,
    extract: Sequence[Extraction] | None = None,
) -> dict[str, Any]:
    """Extract the answer and score it; it is correct if the score reaches `threshold`.

    Extraction comes first because most tasks give `The answer is 5` only part of the score.
    """
    found = find_answer(completion, extract or _policies(answer))
    score = 0.0 if found is None else _score(found, gym)
    return {"score": score, "acc": score >= threshold, "extracted": found}


def _policies(answer: str | None) -> tuple[Extraction, ...]:
    if answer is not None and "\n" in answer.strip():
        return ("tag", "boxed", "whole")  # a grid does not fit on an answer line
    return ("answer_line", "tag", "boxed", "last_number" if _is_number(answer) else "whole")


def _is_number(answer: str | None) -> bool:
    try:
        float(answer or "")
    except ValueError:
        return False
    return True


def _score(found: str, gym: Mapping[str, Any]) -> float:
    task = gym["task"]
    dataset, entry = _item(task, json.dumps(gym["params"], sort_keys=True), gym["seed"], gym["index"])
    if text_digest(entry["question"]) != gym["check"]:
        raise RewardError(
            f"gym:{task}: item {gym['index']} of seed {gym['seed']} is a different question here; install the "
            "version of reasoning-gym that generated the prompt"
        )
    if task in NEVER_RIGHT and NEVER_RIGHT[task].search(found):
        return 0.0
    try:
        # A copy, because some scorers modify the item.
        return float(dataset.score_answer(found, copy.deepcopy(entry)))
    except RAISES_OVER_JUNK.get(task, ()):
        return 0.0


@lru_cache(maxsize=256)
def _item(task: str, params: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """Return the dataset and the item, cached: generating an item can take a third of a second."""
    dataset = _dataset(task, params, seed)
    return dataset, dataset[index]


@lru_cache(maxsize=8)
def _dataset(task: str, params: str, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise RewardError(f"gym:{task}: needs the package reasoning-gym: {install_hint('gym')}") from None
    return reasoning_gym.create_dataset(task, seed=seed, **json.loads(params))
