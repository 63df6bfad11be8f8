"""Compare expressions by their values, at fixed points and to more digits than both texts hold.

Two expressions with N digits between them can come close to each other by chance or by construction, but only to about
10^-N. So they count as equal if they agree, at every point where both have a value, to 35 + N digits, and to more where
a sum has a term that would not show otherwise. The points have 77 digits, which no answer can cancel.

The work is bounded by the size of the expressions. The result depends on nothing else: neither on the clock nor on what
was compared before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dapo.rewards.math.expressions import GaveUp, Tree, add, multiply

_DIGITS = 35  # agreement required beyond the digits of the texts
_SPARE_DIGITS = 15  # for rounding errors
_STABLE_DIGITS = 20
_MAX_DIGITS = 600  # of the arithmetic
_MAX_FUNCTION_DIGITS = 200  # of the texts, if they have functions
_MAX_WORK = 100  # functions in one expression; a factorial counts as ten
_MAX_FACTORS = 200  # of a factorial at a point
_MAX_BITS = 960  # values are between 2^-960 and 2^960, so that no sum of two needs more than _MAX_DIGITS
_BITS = 3.33  # per decimal digit
# For each point, the size of its coordinates and their sign; at 0 some are positive and some negative.
_POINTS = ((1, 1), (3, -1), (2, 0), (Fraction(1, 10), 0), (50, 0), (3_000, 0), (10**7, 1), (10**7, -1))
_FEW_POINTS = 5  # enough for expressions that are not made up of branches, as |x - 100| and \\sqrt{x^2} are
_BRANCHING = frozenset(["^", "ln", "abs", "floor", "ceil"])
_MIN_POINTS = 4  # at which two expressions with variables must have a value
_WORK = {"!": 10, "+": 0, "*": 0, "/": 0, "var": 0, "pi": 0, "e": 0, "i": 0}


class _Undefined(Exception):
    """An expression has no value at this point."""


def is_same_value(left: Tree, right: Tree) -> bool:
    """Return whether two expressions are equal. Raise GaveUp if that needs too much work or precision."""
    agreed = 0
    for x, y, digits in _values_at_points(left, right):
        if not _is_close(x, y, digits):
            return False
        agreed += 1
    return agreed > 0


def constant_ratio(left: Tree, right: Tree) -> int:
    """Return the sign of left / right if it is the same real number everywhere, else 0."""
    first: Any = None
    for x, y, digits in _values_at_points(left, right):
        if not x or not y:
            return 0
        first = first if first is not None else x / y
        if not _is_close(x, first * y, digits):
            return 0
    context = _context()
    if first is None or abs(context.im(first)) > abs(first) * context.mpf(10) ** -_DIGITS:
        return 0
    return 1 if context.re(first) > 0 else -1


def real_value(tree: Tree, digits: int) -> Fraction | None:
    """Return a real constant to `digits` digits, or None if the tree is not one."""
    if variables(tree):
        return None
    if type(tree) is Fraction:
        return tree
    try:
        value, _, _ = _evaluate_pair(tree, Fraction(0), {}, digits)
    except _Undefined:
        return None
    context = _context()
    if abs(context.im(value)) > abs(value) * context.mpf(10) ** -digits:
        return None
    sign, mantissa, exponent, _ = context.re(value)._mpf_
    return (-1 if sign else 1) * int(mantissa) * Fraction(2) ** exponent


@lru_cache(maxsize=4_000)
def variables(tree: Tree) -> frozenset[str]:
    if type(tree) is Fraction:
        return frozenset()
    if tree[0] == "var":
        return frozenset(tree[1:])
    return frozenset().union(*map(variables, tree[1:]))


def subtract(left: Tree, right: Tree) -> Tree:
    return add(left, multiply(Fraction(-1), right))


def _values_at_points(left: Tree, right: Tree) -> Iterator[tuple[Any, Any, int]]:
    """Yield both values at each point where both have one, and the digits to which they must agree."""
    digits, work, branches = map(sum, zip(_count(left), _count(right), strict=True))
    names = sorted(variables(left) | variables(right))
    if work > _MAX_WORK or (work and digits > _MAX_FUNCTION_DIGITS):
        # A look at fewer digits settles most wrong answers.
        with suppress(_Undefined):
            yield _evaluate_pair(left, right, {name: _coordinate(name, 0) for name in names}, 0)
        raise GaveUp("size")
    points = 1 if not names else len(_POINTS) if branches else _FEW_POINTS
    limit, seen = None, 0
    for i in range(points):
        try:
            yield _evaluate_pair(left, right, {name: _coordinate(name, i) for name in names}, digits)
            seen += 1
        except _Undefined as error:
            if error.args:
                yield 0, 1, 1
        except GaveUp as error:
            limit = error
    if limit is not None and seen < min(_MIN_POINTS, points):
        raise limit


@lru_cache(maxsize=4_000)
def _count(tree: Tree) -> tuple[int, int, int]:
    """Return the digits of the constants, the work of the functions, and how many of these have branches."""
    if type(tree) is Fraction:
        return int((tree.numerator.bit_length() + tree.denominator.bit_length()) / _BITS) + 1, 0, 0
    operator, *operands = tree
    if operator == "var":
        return 0, 0, 0
    digits, work, branches = (sum(counts) for counts in zip((0, 0, 0), *map(_count, operands), strict=True))
    if operator == "^" and type(operands[1]) is Fraction and operands[1].denominator == 1:
        return digits, work, branches
    return digits, work + _WORK.get(operator, 1), branches + (operator in _BRANCHING)


@lru_cache(maxsize=1_000)
def _coordinate(name: str, i: int) -> Fraction:
    seed = hashlib.sha256(f"{i}:{name}".encode()).digest()
    scale, sign = _POINTS[i]
    return (Fraction(int.from_bytes(seed), 2**256) + Fraction(1, 2)) * scale * (sign or (-1 if seed[0] % 2 else 1))


@lru_cache(maxsize=1)
def _context() -> Any:
    from mpmath import MPContext  # numbers are judged without it

    return MPContext()


def _evaluate_pair(left: Tree, right: Tree, point: dict[str, Fraction], digits: int) -> tuple[Any, Any, int]:
    """Return both values, and the digits to which equal ones must agree."""
    context = _context()
    precision = digits + _DIGITS + _SPARE_DIGITS
    before: list[Any] = []
    while True:
        context.dps = precision
        is_last = precision == digits + _MAX_DIGITS
        evaluation = _Evaluation(context, point, is_last)
        values = [evaluation.value_or_none(tree) for tree in (left, right)]
        if None in values:
            raise _Undefined(*["only one of them"] * (values != [None, None]))
        agreement = digits + _DIGITS + int(evaluation.spread / _BITS)
        needed = agreement + _SPARE_DIGITS + int(evaluation.lost / _BITS)
        if needed <= precision:
            return values[0], values[1], agreement
        if is_last:
            raise GaveUp("precision")
        # Values that stay the same at a higher precision and are far from each other need no more of it.
        is_stable = all(_is_close(x, y, _STABLE_DIGITS) for x, y in zip(before, values, strict=False))
        if before and is_stable and not _is_close(values[0], values[1], _STABLE_DIGITS // 2):
            return values[0], values[1], agreement
        before = values
        precision = min(2 * needed, digits + _MAX_DIGITS)


def _is_close(x: Any, y: Any, digits: int) -> bool:
    context = _context()
    size, difference = max(abs(x), abs(y)), abs(x - y)
    return not difference or context.mag(difference) < context.mag(size) - digits * _BITS


class _Evaluation:
    """Evaluates a tree at a point, and adds up how many bits the result may have lost.

    `spread`: how much smaller the smallest term of a sum is than the largest; with fewer bits it would not count.
    `lost`: bits lost where a sum or function is small next to its operands. If no bits are left even at the highest
    precision (`is_last`), it is 0, as in \\sin \\pi.
    """

    def __init__(self, context: Any, point: dict[str, Fraction], is_last: bool) -> None:
        self.context = context
        self.is_last = is_last
        self.point = {name: context.mpf(x.numerator) / x.denominator for name, x in point.items()}
        self.spread = self.lost = 0

    def value_or_none(self, tree: Tree) -> Any:
        try:
            return self.value(tree)
        except (ZeroDivisionError, ValueError, OverflowError, _Undefined):
            return None

    def value(self, tree: Tree) -> Any:
        context = self.context
        if type(tree) is Fraction:
            return context.mpf(tree.numerator) / tree.denominator
        operator, *operands = tree
        if operator == "var":
            return self.point[operands[0]]
        if not operands:
            return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[operator]
        if operator == "^":
            result = self._power(self.value(operands[0]), operands[1])
        elif len(operands) == 2:
            result = self._binary(operator, *map(self.value, operands))
        else:
            operand = self.value(operands[0])
            if operator == "!" and not variables(operands[0]) and operand != context.nint(operand):
                raise _Undefined  # `_factorial` differs from the gamma function there
            result = self._function(operator, operand)
        if result and abs(self._magnitude(result)) > _MAX_BITS:
            raise GaveUp("size")
        return result

    def _magnitude(self, value: Any) -> int:
        magnitude = self.context.mag(value)
        if not isinstance(magnitude, int):  # infinity or NaN
            raise _Undefined
        return magnitude

    def _binary(self, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            return left * right
        if operator == "/":
            return left / right
        total = left + right
        if left and right:
            sizes = self._magnitude(left), self._magnitude(right)
            self.spread = max(self.spread, abs(sizes[0] - sizes[1]))
            return self._without_noise(total, max(sizes))
        return total

    def _without_noise(self, result: Any, size: int) -> Any:
        """Count the bits lost in a result that is small next to its operands."""
        if not result:
            return result
        lost = size - self._magnitude(result)
        if self.is_last and lost > self.context.prec - _SPARE_DIGITS * _BITS - self.lost:
            return self.context.mpf(0)
        self.lost += max(0, lost)
        return result

    def _power(self, base: Any, exponent: Tree) -> Any:
        context = self.context
        if type(exponent) is Fraction:
            size = abs(self._magnitude(base)) if base else 0
            if size * abs(exponent) > _MAX_BITS or exponent.numerator.bit_length() > 30:
                raise GaveUp("size")
            if exponent.denominator == 1:
                return base**exponent.numerator
            if exponent.denominator % 2 and context.im(base) == 0 and base < 0:  # the real root, as in school
                return (-1) ** exponent.numerator * self._power(-base, exponent)
            if exponent.denominator == 2:
                return context.sqrt(base) ** exponent.numerator
        value = self.value(exponent)
        if not base:
            if context.im(value) == 0 and value > 0:
                return base
            raise _Undefined
        return self._function("exp", value * context.log(base))

    def _function(self, name: str, x: Any) -> Any:
        context = self.context
        size = self._magnitude(x) if x else 0
        if name in ("abs", "floor", "ceil"):
            return self._step(name, x)
        if name == "!":
            return self._factorial(x)
        if name in _QUOTIENTS:
            over, under = _QUOTIENTS[name]
            return (self._function(over, x) if over else 1) / self._function(under, x)
        if size > _MAX_SIZES.get(name, _MAX_BITS) or (name in ("sin", "cos") and abs(context.im(x)) > 10_000):
            raise GaveUp("size")
        result = getattr(context, _MPMATH_NAMES.get(name, name))(x)
        if name == "exp":
            self.lost += max(0, size)
            return result
        # Near 0, some functions are as small as their argument.
        is_odd = name in ("sin", "sinh", "tanh", "arcsin", "arctan")
        return self._without_noise(
            result, size if name in ("sin", "sinh") else min(size, 0) if is_odd else max(size, 0)
        )

    def _factorial(self, x: Any) -> Any:
        """Return a function with x! = x (x - 1)! and 0! = 1. It costs far less than the gamma function."""
        context = self.context
        if context.im(x) != 0:
            raise _Undefined
        if abs(x) > _MAX_FACTORS:
            raise GaveUp("size")
        steps = int(context.floor(x))
        result = context.mpf(1)
        for i in range(steps):
            result *= x - i
        for i in range(1, 1 - steps):
            result /= x + i
        return result

    def _step(self, name: str, x: Any) -> Any:
        context = self.context
        if name == "abs":
            return abs(x)
        if context.im(x) != 0:
            raise _Undefined
        distance = abs(x - context.nint(x))
        if distance and self._magnitude(distance) < -_DIGITS * _BITS:
            raise GaveUp("precision")  # it may be a rounding error
        return getattr(context, name)(x)


_QUOTIENTS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("", "cos"), "csc": ("", "sin")}
_MAX_SIZES = {"exp": 11, "sinh": 11, "cosh": 11, "tanh": 11, "sin": 100, "cos": 100}  # bits of the argument
_MPMATH_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
