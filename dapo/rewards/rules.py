"""The built-in rules: how each one is called, and which gold answers it can read."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from dapo.config import Extraction, RewardConfig
from dapo.errors import RewardError, did_you_mean
from dapo.rewards.code import CodeRule, read_tests
from dapo.rewards.extract import extract
from dapo.rewards.math.compare import POLICIES, math_reward, read_gold
from dapo.rewards.math.dapo import gold_text, math_dapo_reward
from dapo.rewards.math.spelling import plain_characters
from dapo.rewards.thought import split_thought
from dapo.types import Score

Rule = Callable[..., dict[str, Any]]

RULES = ("math", "math_dapo", "exact", "integer", "choice", "regex", "gym", "code")


def make_rule(name: str, options: RewardConfig) -> Rule:
    """Return the named rule as `reward(completion, answer, **row)` with its options bound.

    A response without an answer is wrong, and so is one whose thought does not end. A gold answer that the rule cannot
    read raises ValueError: the response is unjudged.
    """
    # The tests of `code` may also be in other columns.
    needs_gold = name != "code" and not _ignores_gold(name, options)
    return _OnReply(_rule(name, options), options.think_tags, needs_gold)


class _OnReply:
    """A rule that reads only what follows the thought."""

    def __init__(self, judge: Rule, tags: Sequence[str] | None, needs_gold: bool) -> None:
        self.judge, self.tags, self.needs_gold = judge, tags, needs_gold
        self.patience = getattr(judge, "patience", 1.0)
        self.columns = tuple(inspect.signature(judge).parameters)  # by which it can tell rows apart

    def __call__(self, completion: str, answer: Any, opens_thought: bool = False, **row: Any) -> dict[str, Any]:
        reply = split_thought(completion, self.tags, opens_thought).reply
        outcome = self.judge(reply or "", answer, **row)
        # A pattern of `regex` may match even the empty text.
        return _outcome(False, None) if reply is None and outcome["acc"] else outcome


def _rule(name: str, options: RewardConfig) -> Rule:
    """Return the named rule for the reply alone."""
    _require_rule(name)
    if name == "code":
        return CodeRule(options)
    if name == "math_dapo":
        return math_dapo_reward
    if name == "regex":
        pattern = _compile(options.regex)
        return lambda completion, answer, **row: _regex_reward(completion, answer, pattern)
    if name == "gym":
        from dapo.rewards.gym import gym_reward  # reasoning-gym is an optional dependency

        threshold, extraction = options.threshold, options.extract

        def gym_rule(completion: str, answer: Any, gym: Any = None, **row: Any) -> dict[str, Any]:
            if not isinstance(gym, dict):
                raise ValueError(
                    "the question is not from reasoning-gym; with reward.use: auto, `math` judges such questions"
                )
            return gym_reward(completion, answer, gym=gym, threshold=threshold, extract=extraction)

        return gym_rule
    judge, policies = _BY_EXTRACTION[name]
    policies = options.extract or policies
    # The row's other columns are dropped, so that a column cannot override an option.
    return lambda completion, answer, **row: judge(completion, answer, policies)


def _require_rule(name: str) -> None:
    if name not in RULES:
        hint = did_you_mean(name, RULES)
        raise RewardError(f"reward.use: there is no rule '{name}', the rules are {', '.join(RULES)}{hint}")


def score_timeout(name: str) -> Score:
    """Return the score of a response that a rule could not judge in time: wrong, so that none escapes its penalty."""
    value = -1.0 if name == "math_dapo" else 0.0
    return Score(value, acc=False, extras={"extracted": None, "gave_up": "timeout"})


def can_read_gold(name: str, answer: Any, options: RewardConfig) -> bool:
    """Return whether the rule can read this gold answer."""
    _require_rule(name)
    if _ignores_gold(name, options):
        return True
    try:
        _GOLD_READERS[name](answer)
    except ValueError:
        return False
    return True


def _ignores_gold(name: str, options: RewardConfig) -> bool:
    """Return whether the rule is a task's own scorer, or a pattern without a group."""
    return name == "gym" or (name == "regex" and not _compile(options.regex).groups)


def _exact_reward(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """Compare as text, ignoring surrounding whitespace."""
    gold = _read_text_gold(answer)
    found = extract(completion, policies)
    return _outcome(found is not None and found.strip() == gold, found)


def _integer_reward(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """Compare as exact integers of any size: 034, 34.0, 34. and 1,034 are integers."""
    gold = _read_integer_gold(answer)
    found = extract(completion, policies)
    return _outcome(found is not None and _read_integer(found) == gold, found)


def _choice_reward(completion: str, answer: Any, policies: Sequence[Extraction]) -> dict[str, Any]:
    """Compare as letters from A to J."""
    gold = _read_choice_gold(answer)
    found = extract(completion, policies)
    letter = _read_choice(found) if found is not None else None
    return _outcome(letter == gold, letter)


def _regex_reward(completion: str, answer: Any, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Search for the pattern. If it has a group, the first group of the last match must equal the gold answer."""
    if not pattern.groups:
        match = pattern.search(completion)
        return _outcome(match is not None, match.group() if match else None)
    gold, found = _read_text_gold(answer), None
    for match in pattern.finditer(completion):
        found = match.group(1)
    return _outcome(found is not None and found.strip() == gold, found)


def _outcome(is_right: bool, extracted: str | None) -> dict[str, Any]:
    return {"score": float(is_right), "acc": is_right, "extracted": extracted}


def _compile(regex: str | None) -> re.Pattern[str]:
    if regex is None:
        raise RewardError("reward.regex is not set; the rule `regex` needs a pattern")
    try:
        return re.compile(regex)
    except re.error as error:
        raise RewardError(f"reward.regex is '{regex}', which is not a regular expression: {error}") from None


_MAX_DIGITS = 1_000
_INTEGER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")
_WRAPPING = re.compile(r"\\?\$+|\\[()\[\],!;]|\*\*|\{(?=,\})|(?<=,)\}")


def _read_integer(text: str) -> int | None:
    if len(text) > 2 * _MAX_DIGITS:
        return None
    bare = _WRAPPING.sub("", plain_characters(text)).strip().rstrip(".,;")
    match = _INTEGER.fullmatch(bare)
    if match is None or len(match[2]) > _MAX_DIGITS:
        return None
    return int(match[1] + match[2].replace(",", ""))


# A letter alone, or followed by a mark and the option's text: (A), A., **A**, \text{A}, A) seven, (A) seven. A letter
# followed by a plain space is a word, as in "A train leaves".
_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s?:?\s?)?[(\[]?([A-J])(?:[)\].:].*|)", re.IGNORECASE | re.DOTALL)
_STATED = re.compile(
    r"(?i:answer|option|choice)\s?(?i:is|:)?\s{0,3}[*$]{0,3}(?:\(([A-J])\)|([A-J])(?=[.,;)*$]|\s*$))", re.MULTILINE
)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{([^{}]*)\}|[*_`$]")


def _read_choice(text: str) -> str | None:
    bare = _MARKUP.sub(r"\1", _MARKUP.sub(r"\1", text[-10_000:])).strip()
    match = _CHOICE.fullmatch(bare)
    if match is None:
        stated = _STATED.findall(bare)
        return "".join(stated[-1]).upper() if stated else None
    return match[1].upper()


def _read_text_gold(answer: Any) -> str:
    if answer is None or isinstance(answer, list | dict | tuple) or not str(answer).strip():
        raise ValueError(f"the gold answer is {answer!r}; expected text or a number")
    return str(answer).strip()


def _read_integer_gold(answer: Any) -> int:
    is_whole = isinstance(answer, float) and math.isfinite(answer) and answer.is_integer()
    # A GSM8K row holds the whole solution; the answer follows "####".
    text = str(int(answer)) if is_whole else str(answer).rpartition("####")[2]
    value = None if isinstance(answer, bool) else _read_integer(text)
    if value is None:
        raise ValueError(f"the gold answer is {answer!r}; integer expects a whole number")
    return value


def _read_choice_gold(answer: Any) -> str:
    letter = _read_choice(answer) if isinstance(answer, str) else None
    if letter is None:
        raise ValueError(f"the gold answer is {answer!r}; choice expects a letter from A to J")
    return letter


_GOLD_READERS: dict[str, Callable[[Any], Any]] = {
    "code": lambda answer: read_tests(answer, {}),
    "math": read_gold,
    "math_dapo": gold_text,
    "exact": _read_text_gold,
    "integer": _read_integer_gold,
    "choice": _read_choice_gold,
    "regex": _read_text_gold,
}
_BY_EXTRACTION: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Extraction, ...]]] = {
    "math": (math_reward, POLICIES),
    "exact": (_exact_reward, ("whole",)),
    "integer": (_integer_reward, POLICIES),
    "choice": (_choice_reward, ("answer_line", "boxed", "tag", "whole")),
}
