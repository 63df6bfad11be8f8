"""Parse an answer, as people and models write it, into a number, an expression, an equation, or a group of these.

Structure (lists, sets, tuples, intervals, matrices, names, units, percent signs) is parsed here, so that the computer
algebra system only sees single expressions. It would read `34 35` as a number, 69.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dapo.rewards.math.expressions import is_greek
from dapo.rewards.math.numbers import Number, read_number, read_number_words
from dapo.rewards.math.units import CHANGING_WORDS, CURRENCIES, join_currency, split_tail


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that needs algebra to compare, or plain words."""

    text: str
    mark: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Several answers together. The opening and closing marks tell the kind.

    "(" ")": tuple or open interval; "[" ")" and so on: interval; "{" "}": set; "" "": bare list; "∪" "": union;
    "&" "\\\\": matrix, whose items are rows ("&" "").
    """

    opening: str
    closing: str
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """`x = 34`, `f(2) = 17 \\cdot 2 = 34`, or a relation between expressions."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]  # one fewer than sides
    value: Form  # of the last side


Form = Number | Expression | Group | Equation


def read(text: str) -> Form:
    """Parse a cleaned answer."""
    if text.startswith("⟦") and _is_enclosed(text):
        text = text[1:-1].strip()
    return (
        read_number(text)
        or read_list(text)
        or _read_relation(text)
        or _read_union(text)
        or read_number_words(text)
        or _read_single(text)
    )


_OPENING, _CLOSING = "([{⦃⟦", ")]}⦄⟧"


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split at separators outside of brackets and environments. Brackets need not match, as in [0,1).

    Return the parts and the separators between them.
    """
    parts, found, depth, start = [], [], 0, 0
    cuts = {match.start(): match for match in separator.finditer(text)}
    if not cuts:
        return [text], []
    for i, character in enumerate(text):
        if depth == 0 and i in cuts:
            parts.append(text[start:i].strip())
            found.append(cuts[i].group().strip())
            start = cuts[i].end()
        if character in _OPENING or text.startswith("\\begin", i):
            depth += 1
        elif character in _CLOSING or text.startswith("\\end", i):
            depth -= 1
    return [*parts, text[start:].strip()], found


_COMMAS = re.compile(
    r"(?:[,;]\s?)?(?:⟦\s?[,;]?\s?(?:and|or|und|oder)\s?⟧|(?<![a-zA-Z⟦])(?:and|or)(?![a-zA-Z⟧]))|[,;]|或|和"
)


def read_list(text: str) -> Form | None:
    """Parse several answers separated by commas, `and` or `or`; `±` stands for two."""
    parts, _ = split(text, _COMMAS)
    parts = [part for part in parts if part]
    if len(parts) > 1:
        return Group("", "", _read_members(parts))
    if text.count("±") == 1:
        return Group("", "", (read(text.replace("±", "+")), read(text.replace("±", "-"))))
    return None


def _read_members(parts: list[str]) -> tuple[Form, ...]:
    """Parse the members of a list, with nested bare lists flattened: `±1, 3` has three members."""
    found: list[Form] = []
    for part in parts:
        form = read(part)
        found += form.items if isinstance(form, Group) and form.opening == "" else [form]
    return tuple(found)


_SIGNS = re.compile(r"[<>≤≥≠=≈]")
_VARIABLE = re.compile(r"([a-zA-Z]|\\[a-zA-Z]+)(?:_\{?(?:[\w,]+|\\(?:max|min))\}?)?'*")
_CALL = re.compile(r"(?:([a-zA-Z])(?:_\{?\w+\}?)?'*(?:\^\{-1\})?|\\(?:gcd|lcm|det|max|min)|⟦[^⟧]*⟧)\s?[(\[](.*)[)\]]")
_NEVER_CALLED = frozenset("ektuvwxyznmi")  # n(n+1) is a product
_LABEL = re.compile(
    r"(?:the |its |our )*(?:⟦[^⟧]*⟧|[a-zA-Z]{4,}|sum|ans|max|min|lcm|gcd|[A-Z]{1,5}\d?)(?: [a-zA-Z]+| ?⟦[^⟧]*⟧)*"
    r"|m?\s?\\(?:angle|measuredangle|triangle|overline|overrightarrow|widehat)\s?\{?\s?[A-Z]{1,5}\s?\}?"
    r"|[|\[]\s?[A-Z]{2,6}\s?[|\]]|\\(?:vec|hat)\s?\{?\s?[a-zA-Z]\s?\}?|\\(?:max|min)(?: ?[a-zA-Z])?"
    r"|\\(?:int|sum|prod|lim)(?![a-zA-Z]).*",
    re.DOTALL,
)
_MEMBER_OF = re.compile(r"^(?:[a-zA-Z]|\\[a-zA-Z]+)(?:\([a-zA-Z]\))?\s?(?:∈|⟦\s?in\s?⟧)\s?")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_INFINITIES = Expression("\\infty"), Expression("-\\infty")


def _read_relation(text: str) -> Form | None:
    sides, signs = split(text, _SIGNS)
    if signs and signs[0] == "≈" and len(sides) == 2 and (not sides[0] or names_value(sides[0])):
        return read(sides[1])  # "≈ 8.24"
    if not signs or not all(sides):
        return None
    if set(signs) <= {"=", "≈"}:
        if names_variable(sides[-1]) and not names_value(sides[0]) and set(signs) == {"="}:  # 5 = x
            sides = [sides[-1], *sides[:-1]]
        exact = len(sides) - 1 if "≈" not in signs else signs.index("≈")
        return Equation(tuple(sides), tuple(signs), read(sides[exact]))
    return _read_interval(sides, signs) or Equation(tuple(sides), tuple(signs), read(sides[-1]))


def names_variable(text: str) -> bool:
    """Return whether the text is a lone variable: x, a_1, \\theta."""
    match = _VARIABLE.fullmatch(text)
    return match is not None and (len(match[1]) == 1 or is_greek(match[1]))


def names_value(text: str) -> bool:
    """Return whether the text names a value rather than computing one: x, f(3), AB, the area, m + n."""
    if names_variable(text) or _LABEL.fullmatch(text):
        return True
    call = _CALL.fullmatch(text)
    if call is not None and _is_enclosed(text[call.start(2) - 1 :]):
        return call[1] is None or (call[1] not in _NEVER_CALLED and (call[1] in "fgh" or call[1] not in call[2]))
    parts = [part.strip(" '") for part in text.split("+")]
    is_tuple = text.startswith("(") and all(names_variable(p.strip()) for p in text.strip("()").split(","))
    return is_tuple or (len(set(parts)) == len(parts) > 1 and all(map(names_variable, parts)))


def _read_interval(sides: list[str], signs: list[str]) -> Form | None:
    """Parse an inequality as an interval: `0 ≤ x < 1` is [0,1), `x > 2` is (2,∞), `x ≠ 5` is (-∞,5)∪(5,∞)."""
    if len(sides) == 2 and names_variable(sides[1]) and not names_variable(sides[0]) and signs[0] in FLIPPED:
        sides, signs = sides[::-1], [FLIPPED[signs[0]]]
    if len(sides) == 2 and names_variable(sides[0]) and not names_variable(sides[1]):
        bound, (high, low) = read(sides[1]), _INFINITIES
        if signs[0] == "≠":
            return Group("∪", "", (Group("(", ")", (low, bound)), Group("(", ")", (bound, high))))
        if signs[0] in "<≤":
            return Group("(", ")" if signs[0] == "<" else "]", (low, bound))
        return Group("(" if signs[0] == ">" else "[", ")", (bound, high))
    if len(sides) == 3 and names_variable(sides[1]):
        if set(signs) <= {">", "≥"}:
            sides, signs = sides[::-1], [FLIPPED[sign] for sign in signs[::-1]]
        if set(signs) <= {"<", "≤"}:
            brackets = ("(" if signs[0] == "<" else "["), (")" if signs[1] == "<" else "]")
            return Group(*brackets, (read(sides[0]), read(sides[2])))
    return None


def _read_union(text: str) -> Form | None:
    text = _MEMBER_OF.sub("", text)
    parts, _ = split(text, re.compile("∪"))
    if len(parts) == 1:
        return _read_bracket(text)
    if not all(parts):
        return None
    return Group("∪", "", tuple(read(part) for part in parts))


def _read_bracket(text: str) -> Form | None:
    matrix = re.fullmatch(r"\\begin\s?\{([pb]?)matrix\}(.*)\\end\s?\{\1matrix\}", text, re.DOTALL)
    if matrix:
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        return Group("&", "\\\\", tuple(Group("&", "", tuple(read(c.strip()) for c in row.split("&"))) for row in rows))
    if len(text) < 2 or text[0] not in "([{⦃" or text[-1] not in ")]}⦄" or not _is_enclosed(text):
        return None
    opening, closing = text[0].replace("⦃", "{"), text[-1].replace("⦄", "}")
    parts, _ = split(text[1:-1].strip(), re.compile("[,;]"))
    if len(parts) == 1:  # (34), [34] and {34} are 34
        if not parts[0]:
            return Group("{", "}", ()) if opening == "{" else None
        inner = read(parts[0])
        is_set = opening == "{" and isinstance(inner, Group) and inner.opening == "{"
        return Group("{", "}", (inner,)) if is_set else inner
    return Group(opening, closing, tuple(read(part) for part in parts) if opening != "{" else _read_members(parts))


def depth(text: str) -> int:
    """Return how deeply brackets are nested."""
    now = deepest = 0
    for character in text:
        now += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, now)
    return deepest


def _is_enclosed(text: str) -> bool:
    """Return whether the first and last characters are one pair of brackets."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return i == len(text) - 1
    return False


def _read_single(text: str) -> Expression:
    core, _, mark, unit = split_tail(text)
    sign = core[0] if core and core[0] in CURRENCIES else ""
    unit = join_currency(sign, unit, text)
    bare = re.sub("[⟦⟧]", " ", core).lstrip(CURRENCIES + "+ ").rstrip()
    is_argument = unit == "°" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", core)  # as in \tan 60°
    if unit is None or not bare or is_argument:  # two currencies, or a unit alone: not a value
        return Expression(re.sub("[⟦⟧]", " ", text).strip())
    return Expression(bare, mark, unit)


_SENTENCE = re.compile(
    rf"(?P<before>[a-zA-Z][a-zA-Z',;’\- ]* )(?P<value>[-+]?[{CURRENCIES}]?(?:\\frac|\.?\d).*)", re.DOTALL
)
_MATH = re.compile(r"[\d=<>≤≥≠≈?+*^\\]")


def read_sentence(text: str) -> Number | None:
    """Return the number that a sentence states as its answer: 34 for "She has 34 apples left"."""
    text = re.sub(r"[⟦⟧]", " ", text)
    match = _SENTENCE.fullmatch(re.sub(r" +", " ", text).strip())
    if match is None:
        return None
    before = match["before"].lower().replace("’", "'")
    words = re.findall(r"[a-z']+", before)
    if len(words) < 2 or CHANGING_WORDS & set(words) or any(word.endswith("n't") for word in words):
        return None
    # What follows the number may be its unit, and a clause that says nothing about numbers.
    value, comma, clause = match["value"].partition(", ")
    if comma and (_MATH.search(clause) or CHANGING_WORDS & set(re.findall(r"[a-z']+", clause.lower()))):
        return None
    return read_number(value.rstrip(" .,;!"))
