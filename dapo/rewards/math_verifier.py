"""The `math` rule: whether an answer is mathematically equal to the gold answer.

Numbers are compared exactly, groups (lists, sets, tuples, intervals, matrices) by their structure, words as text, and
what is left, single expressions, by math-verify. Decided knowingly, because training finds what a judge leaves open:

- A number for a number: where the gold answer is written out, so must the answer be. `17 \\cdot 2` or `\\int_0^{34} dx`
  for 34 repeats the question, and for an integer so does `68/2`. Equal fractions are equal: 6/8 is 3/4.
- A decimal is equal to a number without a finite expansion if it is that number rounded to six or more digits.
- Percent signs and number bases must match, but may be left out where the gold answer has them: 50 for 50%, 1010 for
  1010_2; never 10% for 10, nor 0.5 for 50%.
- Units may be left out or added; two known units that differ (7 hours, 7 days) do not match. 45° is 45, and π/4.
- Of `a = b = c` the last side counts, and numbers among the others must agree with it: `34 = 35` is wrong. Of two
  boxes and of two answer lines, the last one counts. A list (`34, 35`, `1 or 2`, `±2`) is never a single number.
- Lists and sets have no order, tuples and matrices do; (1,034) is a pair, and 1,034 a number.
- Words and choices are compared as text without case; expressions that are equal are equal: a question that asks for
  a certain form (factor, expand, simplify) cannot be judged by this rule.
- What is too big to look at is wrong: more than 1,000 characters, or powers and factorials that the gold does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dapo.config import Extraction
from dapo.rewards import math_algebra
from dapo.rewards.extract import extract
from dapo.rewards.math_forms import Equation, Expression, Form, Group, depth, is_label, read, read_list
from dapo.rewards.math_numbers import Number, read_number
from dapo.rewards.math_spelling import clean

POLICIES: tuple[Extraction, ...] = ("answer_line", "boxed", "last_number")
MAX_LENGTH = 1_000  # of an answer; no gold answer is near it
MAX_DEPTH = 20  # of brackets in brackets; reading is recursive
_ROUNDED_DIGITS = 6


def math_reward(completion: str, answer: Any, policies: Sequence[Extraction] = POLICIES) -> dict[str, Any]:
    """1 or 0, by mathematical equality."""
    gold = read_gold(answer)
    found = extract(completion, policies)
    right = found is not None and len(found) <= MAX_LENGTH and is_equal(gold, found)
    return {"score": float(right), "acc": right, "extracted": found}


def read_gold(answer: Any) -> str:
    """The gold answer in one spelling; what no response could ever match is refused."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the gold answer is {answer!r}; math expects a number or a text")
    text = str(answer).rpartition("####")[2]  # GSM8K's rows hold the whole solution, and the answer after this mark
    gold = _gold_spelling(text)
    if not gold or len(text) > MAX_LENGTH:
        raise ValueError(f"the gold answer is {text[:80]!r}; math expects 1 to {MAX_LENGTH} characters")
    return gold


@lru_cache(maxsize=10_000)
def _gold_spelling(answer: str) -> str:
    return clean(answer)


@lru_cache(maxsize=10_000)
def _gold_form(gold: str) -> Form:
    return read(gold)


def is_equal(gold: str, found: str) -> bool:
    """Whether the extracted answer equals the cleaned gold answer."""
    answer = clean(found)
    if answer == gold:
        return True
    if not answer or max(depth(answer), depth(gold)) > MAX_DEPTH:
        return False
    form = _gold_form(gold)
    given: Form | None = read(answer)
    if isinstance(form, Group) and isinstance(given, Number):  # "100,200" is two numbers where two are asked for
        given = read_list(answer)
    return given is not None and _same(form, given)


def _same(gold: Form, answer: Form) -> bool:
    if gold == answer:
        return True
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return _same_equation(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return isinstance(gold, Group) and isinstance(answer, Group) and _same_group(gold, answer)
    if answer.mark not in (gold.mark, "") and (answer.mark, gold.mark) != ("_10", ""):
        return False
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if isinstance(gold, Number):
        return isinstance(answer, Number) and _same_number(gold, answer)
    return _same_expression(gold, answer)


def _same_number(gold: Number, answer: Number) -> bool:
    if gold.kind == "integer" and answer.kind == "fraction":
        return False
    return gold.value == answer.value or (_is_endless(gold.value) and _is_rounded(answer, gold.value))


def _is_endless(value: Fraction) -> bool:
    """Whether the decimal expansion never ends."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _is_rounded(answer: Number, value: Fraction) -> bool:
    """Whether the answer is this value, rounded to the places it shows."""
    enough = answer.kind == "decimal" and answer.digits >= _ROUNDED_DIGITS
    return enough and abs(answer.value - value) <= Fraction(1, 2) * Fraction(10) ** -answer.places


def _same_expression(gold: Expression, answer: Number | Expression) -> bool:
    if isinstance(answer, Expression):
        if _as_text(gold.text) == _as_text(answer.text):
            return True
        if math_algebra.is_wordy(gold.text) or math_algebra.is_wordy(answer.text):
            return False
    if isinstance(answer, Number) and answer.kind == "decimal" and answer.digits >= _ROUNDED_DIGITS:
        value = math_algebra.numeric_value(gold.text, answer.digits + 5)
        return value is not None and _is_rounded(answer, value)
    if answer.unit == "°" and "\\pi" in gold.text:  # degrees for radians
        size = answer.text if isinstance(answer, Expression) else str(answer.value)
        return math_algebra.is_same_expression(gold.text, f"({size})\\cdot\\frac{{\\pi}}{{180}}")
    return math_algebra.is_same_expression(gold.text, answer.text if isinstance(answer, Expression) else answer.value)


def _as_text(text: str) -> str:
    """Without the spaces that mean nothing, the braces of x^{2}, and case."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)).casefold()


def _same_group(gold: Group, answer: Group) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    kinds = {gold.opening, answer.opening}
    if kinds <= {"", "{"} or kinds == {"∪"} or (kinds == {"", "∪"} and _are_intervals(gold) and _are_intervals(answer)):
        return _same_in_some_order(gold.items, answer.items)
    if kinds == {"", "("} and _is_tuple(gold) and _is_tuple(answer):  # the brackets of a tuple left out, or added
        names = [item.sides[0] for item in answer.items if isinstance(item, Equation)]
        return names == sorted(names) and all(map(_same, gold.items, answer.items))
    alike = (gold.opening, gold.closing) == (answer.opening, answer.closing)
    return alike and all(map(_same, gold.items, answer.items))


def _is_tuple(group: Group) -> bool:
    return group.closing in (")", "")


def _are_intervals(group: Group) -> bool:
    return all(isinstance(item, Group) and item.opening in ("(", "[") for item in group.items)


def _same_in_some_order(golds: Sequence[Form], answers: Sequence[Form]) -> bool:
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _same(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _names(side: str, gold: Form) -> bool:
    """Whether a side left of the value is its name (x, f(3), AB, a_1+b^2), or how it was computed (17 \\cdot 2)."""
    number = read_number(side)
    if number is not None:
        return _same(gold, number)
    rest = re.sub(r"[_^]\s?(?:\{[^{}]*\}|\w)|\([^()]*\)|\\[a-zA-Z]+", "", side)
    return not (re.search(r"\d", rest) and re.search(r"[a-zA-Z]", rest))


def _same_equation(gold: Form, answer: Form) -> bool:
    if not isinstance(gold, Equation):
        assert isinstance(answer, Equation)
        # What is equated with the value may be its name or how it was computed, but not another number.
        return (
            set(answer.signs) == {"="}
            and _same(gold, answer.value)
            and all(_names(side, gold) for side in answer.sides[:-1])
        )
    if not isinstance(answer, Equation):
        if all(read_number(side) for side in gold.sides):  # 0.56 = 56%
            return any(_same(read(side), answer) for side in gold.sides)
        return is_label(gold.sides[0]) and set(gold.signs) == {"="} and _same(gold.value, answer)
    if _as_text(gold.sides[0]) == _as_text(answer.sides[0]) and set(gold.signs + answer.signs) == {"="}:
        return _same(gold.value, answer.value)
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return gold.signs == answer.signs and list(map(_as_text, gold.sides)) == list(map(_as_text, answer.sides))
    return math_algebra.is_same_relation(gold.sides, gold.signs[0], answer.sides, answer.signs[0])
