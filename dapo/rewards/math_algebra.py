"""Compare expressions with math-verify and SymPy, after a check that rejects input that would take them too long.

Their own timeouts use signals and are switched off: this code runs in a worker process that can be killed.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympy import Basic

MAX_LENGTH = 400  # characters
_MAX_POWER = 20  # SymPy may expand powers of sums; powers up to the gold answer's largest are always allowed
_MAX_FACTORIAL = 1_000
_ZERO_TOLERANCE = 1e-60  # smaller values are rounding errors of zero

# LaTeX commands that an answer may use. Integrals, sums and limits are excluded, because SymPy would evaluate them.
_KNOWN = """
frac sqrt pi cdot times div sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp infty binom
lvert rvert vert lfloor rfloor lceil rceil overline bar vec hat angle
alpha beta gamma delta epsilon theta lambda mu nu phi varphi psi omega rho sigma tau xi eta zeta kappa
Gamma Delta Theta Lambda Phi Psi Omega Sigma
"""
_COMMANDS = frozenset(_KNOWN.split())


def has_words(text: str) -> bool:
    """Return whether the text has words, names like AB or times of day, which must not be read as products."""
    return bool(re.search(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{4}|[A-Z]{2})|:", text))


def is_same_expression(gold: str, answer: str | Fraction) -> bool:
    """Return whether math-verify finds the two equal. An answer that is unreadable or too large is not equal."""
    if isinstance(answer, str) and not _is_cheap_to_compare(answer, gold):
        return False
    expected = _parse(gold)
    given = _parse(answer) if isinstance(answer, str) else _rational(answer)
    if (
        expected is None
        or given is None
        or _is_infinite(expected) != _is_infinite(given)
        or _differ_at_point(expected, given)
    ):
        return False
    from math_verify import verify

    return verify([expected], [given], timeout_seconds=0)


def is_same_relation(gold: tuple[str, ...], gold_sign: str, answer: tuple[str, ...], answer_sign: str) -> bool:
    """Return whether two equations or inequalities are equivalent: left minus right differs only by a constant factor.

    A negative factor flips the sign of an inequality.
    """
    if not all(_is_cheap_to_compare(side, " ".join(gold)) for side in answer):
        return False
    parsed = [_parse(side) for side in (*gold, *answer)]
    if any(side is None or not hasattr(side, "free_symbols") for side in parsed):
        return False
    from sympy import simplify

    left, right, other_left, other_right = parsed
    expected, given = left - right, other_left - other_right  # pyright: ignore[reportOperatorIssue]
    if expected == 0 or given == 0 or not expected.free_symbols or expected.free_symbols != given.free_symbols:
        return False
    ratio = simplify(expected / given)
    if not ratio.is_number or not ratio.is_finite or ratio.is_zero:
        return False
    flipped = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
    if gold_sign == "=" or answer_sign == "=" or ratio.is_positive:
        return gold_sign == answer_sign
    return bool(ratio.is_negative) and flipped.get(gold_sign) == answer_sign


def numeric_value(text: str, digits: int) -> Fraction | None:
    """Return the value of a real constant to `digits` digits, or None if the text is not one."""
    parsed: Any = _parse(text)
    if parsed is None or getattr(parsed, "free_symbols", True) or not getattr(parsed, "is_number", False):
        return None
    value = parsed.doit().evalf(digits)
    return Fraction(str(value)) if value.is_Float or value.is_Rational else None


def _rational(value: Fraction) -> Any:
    from sympy import Rational

    return Rational(value.numerator, value.denominator)


def _differ_at_point(left: Any, right: Any) -> bool:
    """Return whether the values differ at one fixed point, which settles most wrong answers without algebra."""
    from sympy import Expr, Rational

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    names = sorted({str(symbol) for symbol in left.free_symbols | right.free_symbols})
    point = {name: Rational(2 * i + 5, 7) for i, name in enumerate(names)}
    try:
        values = [e.subs({s: point[str(s)] for s in e.free_symbols}).evalf(20) for e in (left, right)]
    except OverflowError:  # an answer like exp(exp(exp(9))); no gold answer is that large
        return True
    if not all(value.is_number and value.is_finite for value in values):
        return False
    size = max(abs(value) for value in values)
    # The tolerance is relative, because 2^{-98} is not 2^{-94}.
    return bool(size > _ZERO_TOLERANCE and abs(values[0] - values[1]) > 1e-9 * size)


def _is_infinite(parsed: Any) -> bool:
    return bool(getattr(parsed, "is_infinite", False))


_LITERAL_POWER = re.compile(r"\^\s*\{?\s*(-?\d+)")


def _is_cheap_to_compare(answer: str, gold: str) -> bool:
    """Return whether the answer is cheap to compare and well formed: `34 35` is not a product."""
    if len(answer) > MAX_LENGTH or re.search(r"\d\s+\d|\d\s*\.\s*\.|[#&@?]", answer):
        return False
    known = _COMMANDS | set(re.findall(r"\\([a-zA-Z]+)", gold))
    if not set(re.findall(r"\\([a-zA-Z]+)", answer)) <= known or re.search(r"!\s*!|[)}]\s*!", answer):
        return False
    powers = [int(power) for power in _LITERAL_POWER.findall(answer)]
    limit = max([_MAX_POWER, *(int(power) for power in _LITERAL_POWER.findall(gold))])
    if any(abs(power) > limit for power in powers):
        return False
    if ("!" in answer or "binom" in answer) and any(int(n) > _MAX_FACTORIAL for n in re.findall(r"\d+", answer)):
        return False
    return _tower_height(answer) <= max(1, _tower_height(gold)) and not re.search(r"\d{100}", answer)


_POWER_TOKEN = re.compile(r"\^\s*\{|[\^{}]")


def _tower_height(text: str) -> int:
    """Return how deeply powers are nested: 1 for x^2, 2 for 9^{9^9}."""
    if re.search(r"\^\s*-?\w+\s*\^", text):
        return 2
    braces: list[int] = []  # per open brace: 1 if it encloses an exponent
    height = 0
    for token in _POWER_TOKEN.findall(text):
        if token == "}":
            braces[-1:] = []
        elif token == "{":
            braces.append(0)
        else:
            height = max(height, sum(braces) + 1)
            braces += [1] if token != "^" else []
    return height


@lru_cache(maxsize=2_000)
def _parse(text: str) -> Basic | None:
    """Parse one expression; return None if math-verify cannot."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silence its warning that timeouts are off
    # Its unit rules are off, because they read the t of 5t as tons.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    target = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spelling)
    text = text.replace("°", "^\\circ").replace("⦃", "\\{").replace("⦄", "\\}")
    found = parse(f"${text}$", [target], fallback_mode="no_fallback", parsing_timeout=0)
    return found[0] if found and not isinstance(found[0], str) else None
