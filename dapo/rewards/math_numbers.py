"""Parse literal numbers, with the percent sign, number base or unit that may follow them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400  # of one number with its power of ten expanded; keeps arithmetic fast


@dataclass(frozen=True, slots=True)
class Number:
    """A literal number that needs no computation: 34, -3.50, 2/3, 1\\frac{1}{2}, 0.\\overline{3}, 4e6."""

    value: Fraction
    kind: str  # "integer", "decimal" or "fraction": how it is written
    digits: int = 0  # significant digits of an integer or decimal
    places: int = 0  # decimal places
    mark: str = ""  # "%", or "_2" for base two
    unit: str = ""


_GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
_INTEGER = r"\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+])?\s?(?:"
    # \frac{a}{b}, alone or after a whole number
    rf"(?:(?P<whole>\d+)\s?)?\\frac\s?\{{\s?(?P<over>-?\s?(?:{_GROUPED}))\s?\}}\s?\{{\s?(?P<under>-?\s?(?:{_GROUPED}))\s?\}}"
    # a/b, alone or after a whole number
    rf"|(?:(?P<whole2>\d+)\s)?(?P<over2>{_GROUPED})\s?/\s?(?P<under2>-?(?:{_GROUPED}))"
    # 0.1\overline{6}: a repeating decimal
    rf"|(?P<head>\d*)\.(?P<stable>\d*)\\overline\s?\{{(?P<repeating>\d+)\}}"
    # an integer or decimal, with an optional power of ten
    rf"|(?P<integer>{_INTEGER})?(?P<decimal>\.\d*)?"
    rf"(?:[eE](?P<power>[-+]?\d{{1,4}})|\s?(?:\\times|\\cdot|\*)\s?10\s?\^\s?\{{?(?P<power2>[-+]?\d{{1,4}})\}}?)?"
    # multiplier, percent sign, number base or unit
    rf")(?P<tail>.*)",
    re.DOTALL,
)


def read_number(text: str) -> Number | None:
    """Parse a literal number with its multiplier, mark and unit; return None if the text is anything else."""
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > 2 * MAX_DIGITS:
        return None
    core, mark, unit = split_tail(match["tail"], after_number=True)
    factor = _MULTIPLIERS.get(core.strip().lower())
    if core.strip() and factor is None:
        return None
    number = _value(match)
    if number is None:
        return None
    value = (-1 if match["sign"] == "-" else 1) * (factor or 1) * number.value
    return Number(value, number.kind, number.digits, number.places, mark, unit)


def _value(match: re.Match[str]) -> Number | None:
    """Return the number without its sign, multiplier, mark and unit."""
    over, under = match["over"] or match["over2"], match["under"] or match["under2"]
    whole = match["whole"] or match["whole2"]
    if over is not None:
        top, bottom = (int(re.sub("[, ]", "", part)) for part in (over, under))
        if bottom == 0 or (whole is not None and (top < 0 or bottom < 0)):
            return None
        return Number(int(whole or 0) + Fraction(top, bottom), "fraction")
    if match["repeating"] is not None:
        stable, repeating = match["stable"], match["repeating"]
        shift = 10 ** len(stable)
        fraction = Fraction(int(repeating), (10 ** len(repeating) - 1) * shift)
        return Number(int(match["head"] or 0) + Fraction(int(stable or 0), shift) + fraction, "fraction")
    integer, decimal = re.sub("[, ]", "", match["integer"] or ""), (match["decimal"] or ".")[1:]
    power = int(match["power"] or match["power2"] or 0)
    if not integer + decimal or len(integer + decimal) + abs(power) > MAX_DIGITS:
        return None
    value = int(integer + decimal) * Fraction(10) ** (power - len(decimal))
    kind = "decimal" if decimal or power else "integer"
    return Number(value, kind, len((integer + decimal).lstrip("0")), len(decimal) - power)


_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

# Each unit with its other names. Two different units from this table do not match; any other unit is ignored.
_SAME_UNIT = {
    "°": "deg degree",
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram kilo",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "$": "dollar usd buck",
    "¢": "cent",
    "€": "euro eur",
    "mph": "",
    "km/h": "kmh kph",
    "am": "",
    "pm": "",
}
_UNITS = {name: unit for unit, others in _SAME_UNIT.items() for name in (unit, *others.split())}
_LETTERS = frozenset("mgshlJNWV")  # single letters that are units after a number, as in "34 m"
# Words after a number that change its value, so that "3 squared" is not read as 3.
_OPERATOR_WORDS = """
squared cubed factorial plus minus times over divided choose mod modulo root point half halves third thirds quarter
quarters tenths hundredths not or and nor but unless except negative hundred thousand million billion trillion dozen
"""
_OPERATORS = frozenset(_OPERATOR_WORDS.split())
_TAIL = re.compile(r"(?:\s?(?:⟦[^⟧\d]*⟧|°|(?<![a-zA-Z.\\_])[a-zA-Z][a-zA-Z.]*|/)(?:\s?\^\s?\{?[23]\}?)?)+$")
_DIGITS = re.compile(r"[A-Z]*\d[\dA-Z]*")  # in bases above ten, letters are digits, too
_BASE = re.compile(r"_\s?\{?\s?⟦?\s?(?:base )?(\d{1,2}|[a-z]+)\s?⟧?\s?\}?$")


def split_tail(text: str, *, after_number: bool = False) -> tuple[str, str, str]:
    """Split off a trailing mark (percent sign or number base) and unit. Return the rest, the mark and the unit."""
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip(), "%", ""
    base = _BASE.search(text)
    if base and (after_number or _DIGITS.fullmatch(text[: base.start()].strip(" ⟦⟧"))):
        radix = str(_WORDS.get(base[1], base[1]))
        if radix.isdigit() and 2 <= int(radix) <= 36:
            return text[: base.start()].strip(), f"_{radix}", ""
    tail = _TAIL.search(text)
    if tail is None:
        return text, "", ""
    words = re.sub(r"[⟦⟧]", " ", tail.group())
    bare = re.findall(r"[a-zA-Z.]+", re.sub(r"⟦[^⟧]*⟧", " ", tail.group()))
    if set(words.lower().split()) & _OPERATORS:
        first, _, rest = words.strip().partition(" ")
        return (
            (text[: tail.start()] + first, "", _canonical_unit(rest))
            if first.lower() in _MULTIPLIERS
            else (text, "", "")
        )
    if not all(_is_unit_word(word, after_number) for word in bare):
        return text, "", ""
    return text[: tail.start()].strip(), "", _canonical_unit(words)


def _is_unit_word(word: str, after_number: bool) -> bool:
    """Return whether a word outside \\text{} is a unit rather than a product of variables."""
    if len(word) == 1:
        return after_number and word in _LETTERS
    known = word.lower().replace(".", "")
    return known in _UNITS or known.rstrip("s") in _UNITS or (after_number and len(known) > 2)


_SQUARE, _CUBIC = re.compile(r"\bsq(?:uare)?\b|\^\s?\{?2\}?"), re.compile(r"\bcubic\b|\^\s?\{?3\}?")


def _canonical_unit(words: str) -> str:
    """Return the canonical name of the unit, or an empty text if it is unknown."""
    words = words.lower().replace(".", "")
    power = "^2" if _SQUARE.search(words) else "^3" if _CUBIC.search(words) else ""
    name = re.sub(r"\s", "", _CUBIC.sub("", _SQUARE.sub("", words)))
    known = _UNITS.get(name) or _UNITS.get(name.rstrip("s"))
    return known + power if known else ""


_BELOW_TWENTY = """
zero one two three four five six seven eight nine ten
eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_MULTIPLES_OF_TEN = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: value for value, word in enumerate(_BELOW_TWENTY.split())}
_TENS = {word: 10 * value for value, word in enumerate(_MULTIPLES_OF_TEN.split(), start=2)}


def read_number_words(text: str) -> Number | None:
    """Parse zero to ninety-nine, alone or before `hundred`, with an optional `minus` or `negative` in front."""
    words = text.lower().replace("-", " ").split()
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    factor = 100 if words[1:] and words[-1] == "hundred" else 1
    words = words[:-1] if factor > 1 else words
    if len(words) == 2 and words[0] in _TENS and 0 < _WORDS.get(words[1], 0) < 10:
        value = _TENS[words[0]] + _WORDS[words[1]]
    elif len(words) == 1 and words[0] in _WORDS | _TENS:
        value = (_WORDS | _TENS)[words[0]]
    else:
        return None
    return Number(Fraction(sign * factor * value), "integer")
