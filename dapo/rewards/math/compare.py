"""The `math` rule: whether an answer is mathematically equal to the gold answer.

Numbers are compared exactly, groups (lists, sets, tuples, intervals, matrices) by their structure, words as text, and
single expressions by their values at fixed points. What cannot be shown to be equal is wrong.

Training exploits every ambiguity of a judge, so these choices are deliberate:

- If the gold answer is a literal number, the answer must be one too. For 34, `17 \\cdot 2` and `\\int_0^{34} dx` are
  wrong, because they repeat the question; for an integer so is `68/2`. Equal fractions are equal: 6/8 is 3/4.
- A decimal equals a number without a finite expansion if it is that number rounded to six or more digits, and any
  number that is not whole if it is the floating-point form of that number: 0.8333333333333334 is 5/6.
- Percent signs and number bases must match, but may be omitted where the gold answer has them: 50 for 50%, 1010 for
  1010_2. They may not be added or changed: 10% is wrong for 0.1, and 0.5 for 50%. But 25% is 25: datasets leave the
  sign out where the question asks for a percentage.
- Units and currencies may be omitted or added, but two different ones (7 hours, 7 days) do not match. 45° equals 45 and
  π/4. Multiples count: 5 dozens is 60, and 5 sevenths is 5/7. Ratios and times (3:30) are compared as text.
- In `a = b = c` the last side counts. The other sides must name it (x, f(3), AB, m + n) or have the same value, so
  `34 = 35`, `-x = 34` and `x^2 = 34` are wrong for 34. In `a ≈ b` the first side counts, and b must be near it.
- Of two boxes or two answer lines, the last one counts. A list (`34, 35`, `1 or 2`, `±2`) never equals a single number.
- A sentence that states one number is that number, unless it compares or denies it ("fewer than 34").
- Lists and sets are unordered; tuples and matrices are ordered. (1,034) is a pair, and 1,034 is a number.
- Words and choices are compared as text, ignoring case.
- Expressions are compared by value, so this rule cannot judge a question that asks for a form (factor, expand,
  simplify).
- An answer that is too long or too large to compare is wrong, and `gave_up` says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dapo.config import Extraction
from dapo.rewards.extract import extract
from dapo.rewards.math.evaluate import constant_ratio, is_same_value, real_value, subtract
from dapo.rewards.math.expressions import GaveUp, Tree, divide, multiply, parse
from dapo.rewards.math.forms import (
    FLIPPED,
    Equation,
    Expression,
    Form,
    Group,
    depth,
    names_value,
    read,
    read_list,
    read_sentence,
)
from dapo.rewards.math.numbers import Number, read_number
from dapo.rewards.math.spelling import clean
from dapo.rewards.math.units import have_same_unit

POLICIES: tuple[Extraction, ...] = ("answer_line", "boxed", "last_number")
MAX_LENGTH = 1_000  # characters of an answer; gold answers are far shorter
MAX_DEPTH = 20  # of nested brackets; parsing is recursive
MAX_ITEMS = 40  # of a set or list; each is compared with each
_ROUNDED_DIGITS = 6
_FLOAT_DIGITS = 15  # significant digits from which a decimal may be a printed floating-point number
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_INVERSE = re.compile(r"(?:[A-Z]|⟦[A-Z]⟧)\s?\^\s?(?:\d|T|\{(?:-1|[\dnT]+)\})")  # as the name of a matrix: A^{-1}
_FLOAT_ERROR = Fraction(1, 2**51)


def math_reward(completion: str, answer: Any, policies: Sequence[Extraction] = POLICIES) -> dict[str, Any]:
    """Return a score of 1 or 0 by mathematical equality. `gave_up` says why an answer could not be compared."""
    gold = read_gold(answer)
    found = extract(completion, policies)
    try:
        is_right, reason = found is not None and is_equal(gold, found), None
    except GaveUp as error:
        is_right, reason = False, error.reason
    except Exception:  # a response must not escape its score by a fault of the comparison
        is_right, reason = False, "error"
    outcome = {"score": float(is_right), "acc": is_right, "extracted": found}
    return outcome if reason is None else {**outcome, "gave_up": reason}


def read_gold(answer: Any) -> str:
    """Return the gold answer in its normal spelling. Raise ValueError if no response could match it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the gold answer is {answer!r}; math expects a number or text")
    text = str(answer).rpartition("####")[2]  # a GSM8K row holds the whole solution; the answer follows this
    gold = _gold_spelling(text)
    if not gold or len(text) > MAX_LENGTH:
        raise ValueError(f"the gold answer is {text[:80]!r}; math expects 1 to {MAX_LENGTH} characters")
    return gold


_gold_spelling = lru_cache(maxsize=10_000)(clean)
_gold_form = lru_cache(maxsize=10_000)(read)


def is_equal(gold: str, found: str) -> bool:
    """Return whether the extracted answer equals the cleaned gold answer."""
    if len(found) > MAX_LENGTH:
        raise GaveUp("length")
    answer = clean(found)
    if answer == gold:
        return True
    if max(depth(answer), depth(gold)) > MAX_DEPTH:
        raise GaveUp("depth")
    form = _gold_form(gold)
    given: Form | None = read(answer) if answer else None
    if isinstance(form, Number) and not isinstance(given, Number):
        given = read_sentence(answer) or given
    if not isinstance(form, Group) and isinstance(given, Group) and given.opening == "":
        given = read(_without_thousands(answer))  # the comma of x = 1,034 is not that of a list
    if isinstance(form, Group) and isinstance(given, Number):  # "100,200" is two numbers if the gold answer is a list
        given = read_list(answer)
    return given is not None and _same(form, given)


def _without_thousands(text: str) -> str:
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _same(gold: Form, answer: Form) -> bool:
    if gold == answer:
        return True
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return _same_equation(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return isinstance(gold, Group) and isinstance(answer, Group) and _same_group(gold, answer)
    # A percent sign or number base may be omitted but not added, except base ten, and a percent sign where the gold
    # answer can be a percentage: datasets write 25 for "What percentage ...?"
    if answer.mark not in (gold.mark, "") and (answer.mark, gold.mark) != ("_10", ""):
        is_percentage = isinstance(gold, Number) and gold.kind != "fraction" and gold.value >= 1
        if answer.mark != "%" or gold.mark or gold.unit or not is_percentage:
            return False
    turned = _in_the_same_angle_unit(gold, answer)
    if turned is not None:
        return is_same_value(*turned)
    if not have_same_unit(gold.unit, answer.unit):
        return False
    if isinstance(gold, Number):
        return isinstance(answer, Number) and _same_number(gold, answer)
    return _same_expression(gold, answer)


def _in_the_same_angle_unit(gold: Number | Expression, answer: Number | Expression) -> tuple[Tree, Tree] | None:
    """Return both angles in radians if one is in degrees and the other in radians, else None.

    Without a unit, an angle is in radians if it has a π.
    """
    units = [form.unit or ("rad" if "pi" in getattr(form, "text", "") else "") for form in (gold, answer)]
    trees = [_tree(gold), _tree(answer)]
    if sorted(units) != ["rad", "°"] or None in trees:
        return None
    degrees = units.index("°")
    trees[degrees] = multiply(trees[degrees], divide(("pi",), Fraction(180)))
    return trees[0], trees[1]


def _tree(form: Number | Expression) -> Tree | None:
    return form.value if isinstance(form, Number) else parse(form.text)


def _same_number(gold: Number, answer: Number) -> bool:
    if gold.kind == "integer" and answer.kind == "fraction":
        return False
    if gold.value == answer.value:
        return True
    return (_is_nonterminating(gold.value) and _is_rounded(answer, gold.value)) or _is_float_of(answer, gold.value)


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


def _is_float_of(answer: Number, value: Fraction) -> bool:
    """Return whether the answer is this value as floating-point arithmetic prints it."""
    has_enough_digits = answer.kind == "decimal" and answer.digits >= _FLOAT_DIGITS
    return has_enough_digits and value.denominator > 1 and abs(answer.value - value) <= _FLOAT_ERROR * abs(value)


def _same_expression(gold: Expression, answer: Number | Expression) -> bool:
    if isinstance(answer, Expression) and _as_text(gold.text) == _as_text(answer.text):
        return True
    expected, given = parse(gold.text), _tree(answer)
    if expected is None or given is None:
        return False
    if isinstance(answer, Number) and answer.kind == "decimal" and answer.digits >= _ROUNDED_DIGITS:
        value = real_value(expected, answer.digits + 5)
        return value is not None and (_is_rounded(answer, value) or _is_float_of(answer, value))
    return is_same_value(expected, given)


def _as_text(text: str) -> str:
    """Remove insignificant spaces, the braces of x^{2}, and case."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)).casefold()


def _same_group(gold: Group, answer: Group) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    kinds = {gold.opening, answer.opening}
    if len(gold.items) > MAX_ITEMS:
        raise GaveUp("size")
    # Unordered: lists and sets, unions, and a union written as a list of intervals.
    if kinds <= {"", "{"} or kinds == {"∪"} or (kinds == {"", "∪"} and _are_intervals(gold) and _are_intervals(answer)):
        return _same_in_some_order(gold.items, answer.items)
    if kinds == {"", "("} and _is_tuple(gold) and _is_tuple(answer):  # a tuple's brackets may be omitted or added
        # `x = 1, y = 2` is (1, 2), but `y = 1, x = 2` is not: the names must be in order.
        names = [item.sides[0].lstrip("\\") for item in answer.items if isinstance(item, Equation)]
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


def _names_or_computes(side: str, value: Form) -> bool:
    """Return whether a side of an equation names the value (x, f(3), AB) or computes it (17 \\cdot 2)."""
    number = read_number(side)
    if number is not None:
        same = {(number.value, number.mark)} | ({(number.value * 100, "%")} if not number.mark else set())  # 0.5 = 50%
        is_computed = isinstance(value, Number) and (value.value, value.mark) in same
        return is_computed or _same(value, number)
    if names_value(side):
        return True
    if not isinstance(value, Number | Expression):
        return isinstance(value, Group) and value.opening == "&" and _INVERSE.fullmatch(side) is not None
    computed, expected = parse(side), _tree(value)
    return computed is not None and expected is not None and is_same_value(expected, computed)


def _is_near(side: str, value: Form) -> bool:
    """Return whether a side after ≈ is a decimal of the value, rounded or cut off."""
    number, tree = read_number(side), _tree(value) if isinstance(value, Number | Expression) else None
    exact = real_value(tree, 2 * _ROUNDED_DIGITS) if tree is not None else None
    if number is None or exact is None:
        return False
    unit = Fraction(10) ** -number.places
    is_cut_off = abs(number.value) <= abs(exact) and abs(exact - number.value) < unit
    return abs(exact - number.value) <= unit / 2 or (number.places > 0 and is_cut_off)


def _is_consistent(equation: Equation) -> bool:
    """Return whether every side names, computes or approximates the value of the equation."""
    exact = equation.signs.index("≈") if "≈" in equation.signs else len(equation.signs)
    before, after = equation.sides[:exact], equation.sides[exact + 1 :]
    return (
        set(equation.signs) <= {"=", "≈"}
        and all(_names_or_computes(side, equation.value) for side in before)
        and all(_is_near(side, equation.value) for side in after)
    )


def _same_equation(gold: Form, answer: Form) -> bool:
    if not isinstance(gold, Equation):
        assert isinstance(answer, Equation)
        return _same(gold, answer.value) and _is_consistent(answer)
    if not isinstance(answer, Equation):
        if all(read_number(side) for side in gold.sides):  # as in 0.56 = 56%: either side is correct
            return any(_same(read(side), answer) for side in gold.sides)
        # The bare value is accepted where the gold answer only names it, as in x = 12.
        return names_value(gold.sides[0]) and set(gold.signs) <= {"=", "≈"} and _same(gold.value, answer)
    if _as_text(gold.sides[0]) == _as_text(answer.sides[0]) and set(gold.signs + answer.signs) == {"="}:
        rest = Equation(answer.sides[1:], answer.signs[1:], answer.value)
        return _same(gold.value, answer.value) and _is_consistent(rest)
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return gold.signs == answer.signs and list(map(_as_text, gold.sides)) == list(map(_as_text, answer.sides))
    return _same_relation(gold, answer)


def _same_relation(gold: Equation, answer: Equation) -> bool:
    """Return whether two equations or inequalities are equivalent: left minus right differs only by a constant factor.

    A negative factor flips the sign of an inequality.
    """
    trees = [parse(side) for side in (*gold.sides, *answer.sides)]
    if None in trees:
        return False
    sign = constant_ratio(subtract(*trees[:2]), subtract(*trees[2:]))
    if sign == 0:
        return False
    (gold_sign,), (answer_sign,) = gold.signs, answer.signs
    return answer_sign == gold_sign if sign > 0 or gold_sign == "=" else answer_sign == FLIPPED.get(gold_sign)
