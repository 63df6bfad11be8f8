"""The `math_dapo` rule: the judge of the published DAPO recipe, quirks included, for reproducing it.

It reads only the last 300 characters and takes the rest of the line after the last `Answer:`. Prediction and gold
answer are normalized and compared as text. Correct is +1, wrong is -1. For the gold answer 34 it therefore rejects
`34.`, `34.0`, `034`, `**34**`, `**Answer:** 34`, and an answer followed by 300 more characters. For everything but
reproduction, use `math`.
"""

from __future__ import annotations

import re
from typing import Any

WINDOW = 300  # characters
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Applied in this order and also inside words, as published.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_WORDS = """
square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds
meters meals edges students childrentickets multiples
"""
_REMOVED = (
    *_WORDS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = tuple(
    re.compile(rf"\\{command}\{{(.*{lazy})\}}")
    for command, lazy in (("text", "?"), ("textbf", "?"), ("overline", "?"), ("boxed", ""))
)
_DOLLARS = re.compile(r".*?\$(.*?)\$.*")  # within each line: a dot matches no line break, as published


def math_dapo_reward(completion: str, answer: Any, **row: Any) -> dict[str, Any]:
    """Return a score of +1 or -1 by comparing normalized text."""
    found = _ANSWER.findall(completion[-WINDOW:])
    predicted = normalize(found[-1]) if found else None
    is_right = predicted is not None and predicted == normalize(gold_text(answer))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "extracted": predicted}


def gold_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"the gold answer is {answer!r}; math_dapo expects a number or text that is not empty")
    return str(answer)


def normalize(answer: str) -> str:
    """Normalize a final answer as the Minerva evaluation does."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    answer = _DOLLARS.sub(r"$\1$", answer)
    for wrapper in _UNWRAPPED:
        answer = wrapper.sub(r"\1", answer)
    # Add the braces to \frac12 and \sqrt3: without braces, a command takes single characters.
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
