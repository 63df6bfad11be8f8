"""Parse one LaTeX expression into a tree.

A tree is a Fraction, or a tuple of an operator and its operands. Constant subtrees are computed exactly while they are
built, so `\\frac{100!}{98!}` is the Fraction 9900.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

Tree = Any  # Fraction | ("var", name) | (operator, Tree, ...)

MAX_LENGTH = 400  # characters
MAX_DEPTH = 40  # of brackets and commands in each other
MAX_DIGITS = 3_000  # of one constant
MAX_FACTORIAL = 1_000


class GaveUp(Exception):
    """The comparison reached one of its limits. The reason is one word, which becomes the name of a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreadable(Exception):
    """The text is not an expression with a value."""


_FUNCTION_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log lg ln exp"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}  # \\sin^{-1} x is \\arcsin x
_GREEK_NAMES = """
alpha beta gamma delta epsilon varepsilon theta lambda mu nu phi varphi psi omega rho sigma tau xi eta zeta kappa
Gamma Delta Theta Lambda Phi Psi Omega Sigma
"""
_GREEK = frozenset(_GREEK_NAMES.split())
_BRACKETS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_BRACKET_FUNCTIONS = {"|": "abs", "\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
_TIMES, _OVER = {"*", "\\cdot", "\\times"}, {"/", "\\div"}
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[a-zA-Z]+|[a-zA-Z]|[-+*/^_!|(){}\[\]°])\s*")
# Words and names like AB are not products of variables, and `3:5` is not a quotient.
_WORDS = re.compile(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{4}|[A-Z]{2})|:")


def is_greek(command: str) -> bool:
    return command.lstrip("\\") in _GREEK


@lru_cache(maxsize=4_000)
def parse(text: str) -> Tree | None:
    """Return the tree of an expression, or None if the text is not one."""
    if len(text) > MAX_LENGTH:
        raise GaveUp("length")
    if _WORDS.search(text):
        return None
    try:
        return _Parser(text).whole()
    except (Unreadable, ZeroDivisionError):
        return None


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.at = self.depth = 0
        self.closing: list[str] = []  # of the brackets that are open
        end = 0
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise Unreadable
            self.tokens.append(match[1])
            end = match.end()

    def whole(self) -> Tree:
        tree = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable
        return tree

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str = "") -> str:
        found = self.next
        if not found or (token and found != token):
            raise Unreadable
        self.at += 1
        return found

    def sum(self) -> Tree:
        tree = self.signed(self.product)
        while self.next in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            tree = add(tree, multiply(Fraction(sign), self.signed(self.product)))
        return tree

    def signed(self, operand: Any) -> Tree:
        """Parse an operand after at most one sign."""
        sign = -1 if self.next == "-" else 1
        if self.next in ("+", "-"):
            self.take()
        return multiply(Fraction(sign), operand())

    def product(self) -> Tree:
        tree = self.power()
        while True:
            if self.next in _TIMES:
                self.take()
                tree = multiply(tree, self.signed(self.power))
            elif self.next in _OVER:
                slash = self.take()
                tree = divide(tree, self.signed(self.power))
                if slash == "/" and self.begins_factor():
                    raise Unreadable  # 1/2x is x/2 to some and 1/(2x) to others
            elif self.begins_factor():
                tree = multiply(tree, self.power())
            else:
                return tree

    def begins_factor(self) -> bool:
        """Return whether a factor follows without a multiplication sign. `34 35` and `x2` are not products."""
        token = self.next
        if _is_number(token):
            if self.tokens[self.at - 1] in (")", "]", "}"):
                return True
            raise Unreadable
        is_closing = bool(self.closing) and token == self.closing[-1]
        return bool(token) and not is_closing and (token in _BRACKETS or token[0] == "\\" or token.isalpha())

    def power(self) -> Tree:
        tree = self.atom()
        while self.next in ("!", "°"):
            if self.take() == "°":
                tree = multiply(tree, divide(("pi",), Fraction(180)))
            elif self.next == "!":
                raise Unreadable  # a double factorial
            else:
                tree = factorial(tree)
        if self.next == "^":
            tree = raise_to(tree, self.exponent())
            if self.next in ("^", "!"):
                raise Unreadable
        return tree

    def exponent(self) -> Tree:
        self.take("^")
        return self.signed(self.operand)

    def operand(self) -> Tree:
        """Parse the operand of a command or power: braces, a number, or one symbol."""
        return Fraction(self.take()) if _is_number(self.next) else self.atom()

    def atom(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise GaveUp("depth")
        tree = self.symbol(self.take())
        self.depth -= 1
        return tree

    def symbol(self, token: str) -> Tree:
        if _is_number(token):
            return self.mixed(Fraction(token))
        if token in _BRACKETS:
            return self.bracket(token)
        if token.isalpha():
            return self.letter(token)
        if token[0] != "\\":
            raise Unreadable
        name = token[1:]
        if name in _FUNCTIONS:
            return self.function(name)
        if name == "pi":
            return ("pi",)
        if name in _GREEK:
            return ("var", token + self.subscript())
        if name == "frac":
            over = self.operand()
            return divide(over, self.operand())
        if name == "binom":
            over = self.operand()
            return choose(over, self.operand())
        if name == "sqrt":
            degree: Tree = Fraction(2)
            if self.next == "[":
                self.take()
                degree = self.bracket("[")
            return root(degree, self.operand())
        raise Unreadable

    def bracket(self, opening: str) -> Tree:
        closing = _BRACKETS[opening]
        self.closing.append(closing)
        tree = self.sum()
        self.take(closing)
        self.closing.pop()
        return (_BRACKET_FUNCTIONS[opening], tree) if opening in _BRACKET_FUNCTIONS else tree

    def mixed(self, number: Fraction) -> Fraction:
        """Add the fraction of a mixed number: 2\\frac{1}{3} is 7/3, 2\\frac{x}{3} is a product."""
        rest = self.tokens[self.at : self.at + 7]
        if rest[:1] == ["\\frac"] and rest[1::3] == ["{", "{"] and rest[3::3] == ["}", "}"] and number.denominator == 1:
            over, under = rest[2], rest[5]
            if over.isdigit() and under.isdigit() and int(over) < int(under):
                self.at += 7
                return number + Fraction(int(over), int(under))
        return number

    def letter(self, letter: str) -> Tree:
        if letter in "fg" and self.next == "(":
            raise Unreadable  # a function, not a product
        name = letter + self.subscript()
        return (name,) if name in ("e", "i") else ("var", name)

    def subscript(self) -> str:
        if self.next != "_":
            return ""
        self.take()
        if self.next != "{":
            return "_" + self.take()
        end = self.at + self.tokens[self.at :].index("}") if "}" in self.tokens[self.at :] else self.at
        name, self.at = "".join(self.tokens[self.at + 1 : end]), end + 1
        if not name or "{" in name:
            raise Unreadable
        return "_" + name

    def function(self, name: str) -> Tree:
        base: Tree = None
        power: Tree = Fraction(1)
        while self.next in ("_", "^"):
            if self.next == "^":
                power = self.exponent()
            elif name == "log" and base is None:
                self.take()
                base = self.operand()
            else:
                raise Unreadable
        if power == -1 and name in _INVERSES:
            name, power = _INVERSES[name], Fraction(1)
        argument = self.argument()
        if name in ("log", "lg"):  # base ten unless it has another
            value = divide(("ln", argument), ("ln", Fraction(10) if base is None else base))
        else:
            value = (name, argument)
        return raise_to(value, power)

    def argument(self) -> Tree:
        """Parse what a function applies to: a bracket, or the product up to the next operator or function."""
        if self.next in _BRACKETS and self.next != "|":
            return self.atom()
        tree = self.signed(self.power)
        while self.begins_factor() and self.next[1:] not in _FUNCTIONS:
            tree = multiply(tree, self.power())
        return tree


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_DIGITS * 3.33:
        raise GaveUp("size")
    return value


def add(left: Tree, right: Tree) -> Tree:
    if type(left) is Fraction and type(right) is Fraction:
        return _checked(left + right)
    return right if left == 0 else left if right == 0 else ("+", left, right)


def multiply(left: Tree, right: Tree) -> Tree:
    if type(left) is Fraction and type(right) is Fraction:
        return _checked(left * right)
    return right if left == 1 else left if right == 1 else ("*", left, right)


def divide(left: Tree, right: Tree) -> Tree:
    if right == 0:
        raise Unreadable
    if type(left) is Fraction and type(right) is Fraction:
        return _checked(left / right)
    return ("/", left, right)


def raise_to(base: Tree, exponent: Tree) -> Tree:
    if exponent == 1:
        return base
    if type(base) is Fraction and type(exponent) is Fraction and exponent.denominator == 1:
        n = exponent.numerator
        if base == 0 and n <= 0:
            raise Unreadable
        bits = base.numerator.bit_length() + base.denominator.bit_length() - 2  # 0 for 1 and -1
        if bits * abs(n) <= MAX_DIGITS * 3.33:
            return _checked(base ** (n if bits else n % 2 + 2))
    return ("^", base, exponent)


def root(degree: Tree, radicand: Tree) -> Tree:
    return raise_to(radicand, divide(Fraction(1), degree))


def factorial(n: Tree) -> Tree:
    if type(n) is Fraction:
        if n.denominator != 1 or n < 0:
            raise Unreadable
        if n > MAX_FACTORIAL:
            raise GaveUp("size")
        return _checked(Fraction(math.factorial(n.numerator)))
    return ("!", n)


def choose(n: Tree, k: Tree) -> Tree:
    if type(n) is Fraction and type(k) is Fraction:
        if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
            raise Unreadable
        if n > MAX_FACTORIAL:
            raise GaveUp("size")
        return Fraction(math.comb(n.numerator, k.numerator))
    return divide(factorial(n), multiply(factorial(k), factorial(add(n, multiply(Fraction(-1), k)))))
