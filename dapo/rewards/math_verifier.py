"""The `math` rule: whether an answer is mathematically equal to the gold answer.

Numbers are compared exactly, groups (lists, sets, tuples, intervals, matrices) by their structure, words as text, and
single expressions by math-verify. Training exploits every ambiguity of a judge, so these choices are deliberate:

- If the gold answer is a literal number, the answer must be one too. For 34, `17 \\cdot 2` and `\\int_0^{34} dx` are
  wrong, because they repeat the question; for an integer so is `68/2`. Equal fractions are equal: 6/8 is 3/4.
- A decimal equals a number without a finite expansion if it is that number rounded to six or more digits.
- Percent signs and number bases must match, but may be omitted where the gold answer has them: 50 for 50%, 1010 for
  1010_2. They may not be added or changed: 10% is wrong for 10, and 0.5 for 50%.
- Units may be omitted or added, but two different known units (7 hours, 7 days) do not match. 45° equals 45 and π/4.
- In `a = b = c` the last side counts, and numbers on the other sides must equal it: `34 = 35` is wrong. Of two boxes or
  two answer lines, the last one counts. A list (`34, 35`, `1 or 2`, `±2`) never equals a single number.
- Lists and sets are unordered; tuples and matrices are ordered. (1,034) is a pair, and 1,034 is a number.
- Words and choices are compared as text, ignoring case.
- Expressions are compared by value, so this rule cannot judge a question that asks for a form (factor, expand,
  simplify).
- Oversized answers are wrong: more than 1,000 characters, or powers and factorials that the gold answer does not have.
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
MAX_LENGTH = 1_000  # characters of an answer; gold answers are far shorter
MAX_DEPTH = 20  # of nested brackets; parsing is recursive
_ROUNDED_DIGITS = 6


def math_reward(completion: str, answer: Any, policies: Sequence[Extraction] = POLICIES) -> dict[str, Any]:
    """Return a score of 1 or 0 by mathematical equality."""
    gold = read_gold(answer)
    found = extract(completion, policies)
    is_right = found is not None and len(found) <= MAX_LENGTH and is_equal(gold, found)
    return {"score": float(is_right), "acc": is_right, "extracted": found}


def read_gold(answer: Any) -> str:
    """Return the gold answer in its normal spelling. Raise ValueError if no response could match it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the gold answer is {answer!r}; math expects a number or a text")
    text = str(answer).rpartition("####")[2]  # a GSM8K row holds the whole solution; the answer follows this
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
    """Return whether the extracted answer equals the cleaned gold answer."""
    answer = clean(found)
    if answer == gold:
        return True
    if not answer or max(depth(answer), depth(gold)) > MAX_DEPTH:
        return False
    form = _gold_form(gold)
    given: Form | None = read(answer)
    if isinstance(form, Group) and isinstance(given, Number):  # "100,200" is two numbers if the gold answer is a list
        given = read_list(answer)
    return given is not None and _same(form, given)


def _same(gold: Form, answer: Form) -> bool:
    if gold == answer:
        return True
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return _same_equation(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return isinstance(gold, Group) and isinstance(answer, Group) and _same_group(gold, answer)
    # A percent sign or number base may be omitted but not added, except base ten.
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
    return gold.value == answer.value or (_is_nonterminating(gold.value) and _is_rounded(answer, gold.value))


def _is_nonterminating(value: Fraction) -> bool:
    """Return whether the decimal expansion is infinite."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _is_rounded(answer: Number, value: Fraction) -> bool:
    """Return whether the answer is this value, rounded to the answer's own decimal places."""
    has_enough_digits = answer.kind == "decimal" and answer.digits >= _ROUNDED_DIGITS
    return has_enough_digits and abs(answer.value - value) <= Fraction(1, 2) * Fraction(10) ** -answer.places


def _same_expression(gold: Expression, answer: Number | Expression) -> bool:
    if isinstance(answer, Expression):
        if _as_text(gold.text) == _as_text(answer.text):
            return True
        if math_algebra.has_words(gold.text) or math_algebra.has_words(answer.text):
            return False
    if isinstance(answer, Number) and answer.kind == "decimal" and answer.digits >= _ROUNDED_DIGITS:
        value = math_algebra.numeric_value(gold.text, answer.digits + 5)
        return value is not None and _is_rounded(answer, value)
    if answer.unit == "°" and "\\pi" in gold.text:  # degrees for radians
        size = answer.text if isinstance(answer, Expression) else str(answer.value)
        return math_algebra.is_same_expression(gold.text, f"({size})\\cdot\\frac{{\\pi}}{{180}}")
    return math_algebra.is_same_expression(gold.text, answer.text if isinstance(answer, Expression) else answer.value)


def _as_text(text: str) -> str:
    """Remove insignificant spaces, the braces of x^{2}, and case."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)).casefold()


def _same_group(gold: Group, answer: Group) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    kinds = {gold.opening, answer.opening}
    # Unordered: lists and sets, unions, and a union written as a list of intervals.
    if kinds <= {"", "{"} or kinds == {"∪"} or (kinds == {"", "∪"} and _are_intervals(gold) and _are_intervals(answer)):
        return _same_in_some_order(gold.items, answer.items)
    if kinds == {"", "("} and _is_tuple(gold) and _is_tuple(answer):  # a tuple's brackets may be omitted or added
        # `x = 1, y = 2` is (1, 2), but `y = 1, x = 2` is not: the names must be in order.
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


def _names_or_computes(side: str, gold: Form) -> bool:
    """Return whether a side left of the value names it (x, f(3), AB, a_1+b^2) or computes it (17 \\cdot 2)."""
    number = read_number(side)
    if number is not None:
        return _same(gold, number)
    # Digits next to letters, as in 2x, make it an equation to solve. Subscripts, powers and arguments do not count.
    rest = re.sub(r"[_^]\s?(?:\{[^{}]*\}|\w)|\([^()]*\)|\\[a-zA-Z]+", "", side)
    return not (re.search(r"\d", rest) and re.search(r"[a-zA-Z]", rest))


def _same_equation(gold: Form, answer: Form) -> bool:
    if not isinstance(gold, Equation):
        assert isinstance(answer, Equation)
        # The other sides may name the value or compute it, but may not be another number.
        return (
            set(answer.signs) == {"="}
            and _same(gold, answer.value)
            and all(_names_or_computes(side, gold) for side in answer.sides[:-1])
        )
    if not isinstance(answer, Equation):
        if all(read_number(side) for side in gold.sides):  # as in 0.56 = 56%: either side is correct
            return any(_same(read(side), answer) for side in gold.sides)
        # The bare value is accepted where the gold answer only names it, as in x = 12.
        return is_label(gold.sides[0]) and set(gold.signs) == {"="} and _same(gold.value, answer)
    if _as_text(gold.sides[0]) == _as_text(answer.sides[0]) and set(gold.signs + answer.signs) == {"="}:
        return _same(gold.value, answer.value)
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return gold.signs == answer.signs and list(map(_as_text, gold.sides)) == list(map(_as_text, answer.sides))
    return math_algebra.is_same_relation(gold.sides, gold.signs[0], answer.sides, answer.signs[0])
