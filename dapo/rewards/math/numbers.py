"""Parse literal numbers, with the percent sign, number base or unit that may follow them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from dapo.rewards.math.units import BELOW_TWENTY, CURRENCIES, TENS, join_currency, split_tail

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
    rf"(?P<sign>[-+])?\s?(?P<currency>[{CURRENCIES}])?\s?(?P<inner_sign>(?<=[{CURRENCIES}])-)?(?:"
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
    if text.isdecimal() and len(text) <= MAX_DIGITS:  # the common case
        return Number(Fraction(int(text)), "integer", len(text.lstrip("0")))
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > 2 * MAX_DIGITS:
        return None
    rest, factor, mark, unit = split_tail(match["tail"], after_number=True)
    number = _value(match) if not rest else None
    unit = join_currency(match["currency"] or "", unit, match["tail"])
    if number is None or unit is None:
        return None
    value = (-1 if "-" in (match["sign"], match["inner_sign"]) else 1) * factor * number.value
    kind = "fraction" if factor < 1 else number.kind
    return Number(value, kind, number.digits, number.places, mark, unit)


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


_NUMBER_WORDS = re.compile(
    rf"(?i)(minus |negative )?(?:({'|'.join(TENS)})(?:[- ]({'|'.join(BELOW_TWENTY[1:10])}))?"
    rf"|({'|'.join(reversed(BELOW_TWENTY))}))(?![a-z])"
)


def read_number_words(text: str) -> Number | None:
    """Parse a number that starts with words from zero to ninety-nine: `six`, `minus two hundred`, `five sevenths`."""
    bare = re.sub(r"[⟦⟧]", " ", text).strip()
    match = _NUMBER_WORDS.match(bare)
    if match is None:
        return None
    sign, ten, one, small = (part.lower() if part else None for part in match.groups())
    value = BELOW_TWENTY.index(small or one or "zero") + (10 * (TENS.index(ten) + 2) if ten else 0)
    return read_number(f"{'-' if sign else ''}{value}{bare[match.end() :]}")
