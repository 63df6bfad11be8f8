"""The judge of the published DAPO recipe, quirks included: for reproducing it, not for judging well.

Only the last 300 characters are read; the last `Answer:` there counts up to the end of its line; prediction and gold
are normalized as text and compared as text; right is +1 and wrong is -1. So `34.`, `34.0`, `034`, `**34**`,
`**Answer:** 34` and an answer followed by 300 more characters are wrong for 34. Use `math` for anything else.
"""

from __future__ import annotations

import re
from typing import Any

WINDOW = 300
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Applied in this order, everywhere in the text and not only at word boundaries: that is the published behavior.
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
_DOLLARS = re.compile(r"^.*?\$(.*?)\$.*$", re.DOTALL)


def math_dapo_reward(completion: str, answer: Any, **row: Any) -> dict[str, Any]:
    """+1 or -1, by text."""
    found = _ANSWER.findall(completion[-WINDOW:])
    predicted = normalize(found[-1]) if found else None
    right = predicted is not None and predicted == normalize(gold_text(answer))
    return {"score": 1.0 if right else -1.0, "acc": right, "extracted": predicted}


def gold_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"the gold answer is {answer!r}; math_dapo expects a number or a text that is not empty")
    return str(answer)


def normalize(answer: str) -> str:
    """The Minerva normalization of a final answer."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    answer = _DOLLARS.sub(r"$\1$", answer)
    for wrapper in _UNWRAPPED:
        answer = wrapper.sub(r"\1", answer)
    # \frac12 and \sqrt3 get their braces: a command followed by anything but a brace takes single characters.
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
