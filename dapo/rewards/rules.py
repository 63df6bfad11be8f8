"""The rules that judge by looking at the answer: how they are called, and which gold answers they can work with."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from dapo.config import Extraction, RewardConfig
from dapo.errors import RewardError
from dapo.rewards.extract import extract
from dapo.rewards.math_dapo import gold_text, math_dapo_reward
from dapo.rewards.math_verifier import POLICIES, math_reward, read_gold

Rule = Callable[..., dict[str, Any]]

RULES = ("math", "math_dapo", "exact", "integer", "choice", "regex", "gym")


def make_rule(name: str, options: RewardConfig) -> Rule:
    """The rule of this name as `reward(completion, answer, **row)`, its options bound.

    A response without an answer is wrong. A gold answer the rule cannot use raises ValueError: nothing was judged.
    """
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise RewardError(f"reward.use: there is no rule '{name}', the rules are {', '.join(RULES)}{hint}")
    if name == "math_dapo":
        return math_dapo_reward
    if name == "regex":
        pattern = _compile(options.regex)
        return lambda completion, answer, **row: _regex(completion, answer, pattern)
    if name == "gym":
        from dapo.rewards.gym import gym_reward  # reasoning-gym is an optional dependency

        threshold, own = options.threshold, options.extract

        def by_gym(completion: str, answer: Any, gym: Any = None, **row: Any) -> dict[str, Any]:
            if not isinstance(gym, dict):
                raise ValueError(
                    "the question is none of reasoning-gym's; with reward.use: auto `math` judges the others"
                )
            return gym_reward(completion, answer, gym=gym, threshold=threshold, extract=own)

        return by_gym
    judge, policies = _BY_EXTRACTION[name]
    policies = options.extract or policies
    # The row's other columns are dropped here, so that none of them can pass for an option.
    return lambda completion, answer, **row: judge(completion, answer, policies)


def can_parse(name: str, answer: Any, options: RewardConfig) -> bool:
    """Whether this rule could ever judge a response against this gold answer."""
    make_rule(name, options)
    if name == "gym" or (name == "regex" and not _compile(options.regex).groups):
        return True  # the task's own scorer, and a pattern without a group, do not look at the gold answer
    try:
        _GOLDS[name](answer)
    except ValueError:
        return False
    return True


def _exact(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """The same text, but for white space around it."""
    gold = _text_gold(answer)
    found = extract(completion, policies)
    return _verdict(found is not None and found.strip() == gold, found)


def _same_integer(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """The same integer: 034, 34.0, 34. and 1,034 are read as people mean them, and no digit is lost."""
    gold = _integer_gold(answer)
    found = extract(completion, policies)
    return _verdict(found is not None and _integer(found) == gold, found)


def _same_choice(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """The same letter of A to J."""
    gold = _choice_gold(answer)
    found = extract(completion, policies)
    letter = _choice(found) if found is not None else None
    return _verdict(letter == gold, letter)


def _regex(completion: str, answer: Any, pattern: re.Pattern[str]) -> dict[str, Any]:
    """The pattern is found; its first group, where it has one, is the gold answer, the last time it is found."""
    if not pattern.groups:
        match = pattern.search(completion)
        return _verdict(match is not None, match.group() if match else None)
    gold, found = _text_gold(answer), None
    for match in pattern.finditer(completion):
        found = match.group(1)
    return _verdict(found is not None and found.strip() == gold, found)


def _verdict(right: bool, extracted: str | None) -> dict[str, Any]:
    return {"score": float(right), "acc": right, "extracted": extracted}


def _compile(regex: str | None) -> re.Pattern[str]:
    if regex is None:
        raise RewardError("reward.regex is not set; the rule `regex` needs the pattern that a response must match")
    try:
        return re.compile(regex)
    except re.error as error:
        raise RewardError(f"reward.regex is '{regex}', which is not a regular expression: {error}") from None


_MAX_DIGITS = 1_000
_INTEGER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")
_WRAPPING = re.compile(r"\\?\$+|\\[()\[\],!;]|\*\*|\{(?=,\})|(?<=,)\}")


def _integer(text: str) -> int | None:
    if len(text) > 2 * _MAX_DIGITS:
        return None
    bare = _WRAPPING.sub("", text).replace("−", "-").strip().rstrip(".,;")
    match = _INTEGER.fullmatch(bare)
    if match is None or len(match[2]) > _MAX_DIGITS:
        return None
    return int(match[1] + match[2].replace(",", ""))


# A letter alone, or with the option's text behind a mark: (A), A., **A**, \text{A}, A) seven, (A) seven. A letter
# before a plain space is a word: "A train leaves".
_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s?:?\s?)?[(\[]?([A-J])(?:[)\].:].*|)", re.IGNORECASE | re.DOTALL)
_STATED = re.compile(
    r"(?i:answer|option|choice)\s?(?i:is|:)?\s{0,3}[*$]{0,3}(?:\(([A-J])\)|([A-J])(?=[.,;)*$]|\s*$))", re.MULTILINE
)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{([^{}]*)\}|[*_`$]")


def _choice(text: str) -> str | None:
    bare = _MARKUP.sub(r"\1", _MARKUP.sub(r"\1", text[-10_000:])).strip()
    match = _CHOICE.fullmatch(bare)
    if match is None:
        stated = _STATED.findall(bare)
        return "".join(stated[-1]).upper() if stated else None
    return match[1].upper()


def _text_gold(answer: Any) -> str:
    if answer is None or isinstance(answer, list | dict | tuple) or not str(answer).strip():
        raise ValueError(f"the gold answer is {answer!r}; expected a text or a number")
    return str(answer).strip()


def _integer_gold(answer: Any) -> int:
    whole = isinstance(answer, float) and math.isfinite(answer) and answer.is_integer()
    text = str(int(answer)) if whole else str(answer).rpartition("####")[2]  # GSM8K's rows hold the whole solution
    value = None if isinstance(answer, bool) else _integer(text)
    if value is None:
        raise ValueError(f"the gold answer is {answer!r}; integer expects a whole number")
    return value


def _choice_gold(answer: Any) -> str:
    letter = _choice(answer) if isinstance(answer, str) else None
    if letter is None:
        raise ValueError(f"the gold answer is {answer!r}; choice expects a letter from A to J")
    return letter


_GOLDS: dict[str, Callable[[Any], Any]] = {
    "math": read_gold,
    "math_dapo": gold_text,
    "exact": _text_gold,
    "integer": _integer_gold,
    "choice": _choice_gold,
    "regex": _text_gold,
}
_BY_EXTRACTION: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Extraction, ...]]] = {
    "math": (math_reward, POLICIES),
    "exact": (_exact, ("whole",)),
    "integer": (_same_integer, POLICIES),
    "choice": (_same_choice, ("answer_line", "boxed", "tag", "whole")),
}
