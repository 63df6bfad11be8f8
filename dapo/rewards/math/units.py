"""Split the unit, percent sign, number base or multiple off the end of an answer, and compare units."""

from __future__ import annotations

import re
from fractions import Fraction

# Each unit with its other names.
_SAME_UNIT = {
    "°": "deg degree",
    "rad": "radian",
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "ton": "tonne",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "gal": "gallon",
    "ms": "millisecond",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "$": "¤ dollar usd buck",
    "¢": "cent penny pennie",
    "€": "euro eur",
    "£": "gbp sterling",
    "¥": "yen yuan rmb jpy cny",
    "₹": "rupee inr",
    "mi/h": "mph",
    "km/h": "kmh kph",
    "am": "",
    "pm": "",
    "acre": "",
    "j": "joule",
    "n": "newton",
    "w": "watt",
    "v": "volt",
    "a": "amp ampere",
    "hz": "hertz",
}
CURRENCIES = "¤€£¥₹¢"  # ¤ stands for the dollar; $ delimits formulas
_UNITS = {name: unit for unit, others in _SAME_UNIT.items() for name in (unit, *others.split()) if len(name) > 1}
_UNITS |= {sign: _UNITS.get(sign, sign) for sign in CURRENCIES + "°"} | {"¤": "$"}
_LETTERS = {letter.lower(): letter for letter in "mgshlJNWVA"}  # units of one letter after a number, as in "34 m"

_BELOW_TWENTY = """
zero one two three four five six seven eight nine ten
eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
BELOW_TWENTY: list[str] = [*_BELOW_TWENTY.split()]
TENS: list[str] = [*_TENS.split()]
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "quadrillion": 15}
_ORDINALS = """
third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth
seventeenth eighteenth nineteenth twentieth
"""
# Words after a number that multiply it. In the plural they are "5 dozens" and "5 sevenths".
_MULTIPLES: dict[str, Fraction] = {
    "dozen": Fraction(12),
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
    **{word: Fraction(10**power) for word, power in _POWERS.items()},
    **{f"{word}th": Fraction(1, 10**power) for word, power in _POWERS.items()},
    **{word: Fraction(1, n) for n, word in enumerate(_ORDINALS.split(), start=3)},
}
# Words that change, compare, deny or approximate a number, so that "3 squared" and "fewer than 3" are not read as 3.
_OTHER_CHANGES = """
squared cubed factorial plus minus times multiplied over divided choose mod modulo root point power exponent logarithm
inverse reciprocal double doubled triple tripled twice thrice quarter quarters score scores gross lakh lakhs
crore crores myriad myriads grand mil mill mils mln bil bln tril thou ppm permille basis out ratio
not or and nor but unless except neither never no none isn't without cannot can't wrong incorrect impossible if instead
negative positive more less fewer greater smaller than least most about around approximately approx roughly nearly
almost under below above between within estimated maximum minimum beyond exceeding
"""
CHANGING_WORDS = frozenset([*_OTHER_CHANGES.split(), *BELOW_TWENTY, *TENS, *_MULTIPLES, *(f"{w}s" for w in _MULTIPLES)])
_WORD = rf"⟦[^⟧\d]*⟧|[°{CURRENCIES}]|(?<![a-zA-Z.\\_])[a-zA-Z][a-zA-Z.]*|/"
_TAIL = re.compile(rf"(?:\s?(?:{_WORD})(?:\s?\^\s?\{{?[23]\}}?)?)+$")
_DIGITS = re.compile(r"[A-Z]*\d[\dA-Z]*")  # in bases above ten, letters are digits, too
_BASE = re.compile(r"_\s?\{?\s?⟦?\s?(?:base )?(\d{1,2}|[a-z]+)\s?⟧?\s?\}?$")


def split_tail(text: str, *, after_number: bool = False) -> tuple[str, Fraction, str, str]:
    """Split off what may follow a value. Return the rest, the multiple, the mark (percent or base) and the unit."""
    text = text.strip()
    one = Fraction(1)
    if not text:
        return "", one, "", ""
    if text.endswith("%"):
        return text[:-1].strip(), one, "%", ""
    base = _BASE.search(text)
    if base and (after_number or _DIGITS.fullmatch(text[: base.start()].strip(" ⟦⟧"))):
        radix = str(BELOW_TWENTY.index(base[1]) if base[1] in BELOW_TWENTY else base[1])
        if radix.isdigit() and 2 <= int(radix) <= 36:
            return text[: base.start()].strip(), one, f"_{radix}", ""
    tail = _TAIL.search(text)
    if tail is None:
        return text, one, "", ""
    words = re.findall(
        r"[a-zA-Z.'’-]+|\^\s?\{?[23]|\S", re.sub(r"[⟦⟧]|(?<=square)(?!d)|(?<=cubic)", " ", tail.group().lower())
    )
    multiple = _multiple(words[0]) if words and after_number else None
    rest = words[1:] if multiple else words
    # Letters outside of \text{} may be variables.
    bare = re.findall(r"[a-zA-Z.]+", re.sub(r"⟦[^⟧]*⟧", " ", tail.group()))
    bare = bare[1:] if multiple and bare and bare[0].lower() == words[0] else bare
    bare = [word for word in bare if len(bare) == 1 or word not in _FILLERS]
    # "34 more apples" and "34 times", but not "34 more than" and "34 times ten".
    if after_number and rest and (rest[0] in ("more", "fewer", "less") or rest == ["times"]):
        rest = rest[1:]
    if any(map(_changes_number, rest)) or not all(_is_unit_word(word, after_number) for word in bare):
        return text, one, "", ""
    return text[: tail.start()].strip(), multiple or one, "", _canonical_unit(rest)


def _changes_number(word: str) -> bool:
    return word in CHANGING_WORDS or word.removesuffix("s").endswith("illion")


def _multiple(word: str) -> Fraction | None:
    return _MULTIPLES.get(word) or _MULTIPLES.get(word.removesuffix("s"))


def _known(word: str) -> str | None:
    word = word.replace(".", "")
    return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))


def _is_unit_word(word: str, after_number: bool) -> bool:
    """Return whether a word outside \\text{} is a unit rather than a product of variables."""
    if len(word) == 1:
        return after_number and (word in _LETTERS.values() or word == "L")
    if re.fullmatch(r"st|nd|rd|th", word):
        return after_number
    return (
        _known(word.lower()) is not None
        or word.lower() in _POWER_WORDS
        or (after_number and len(word.replace(".", "")) > 2)
    )


_POWER_WORDS = {"sq": "^2", "sq.": "^2", "square": "^2", "cubic": "^3", "cu": "^3", "cu.": "^3"}
_FILLER_WORDS = """
a an the of in on at to for with by from total altogether each left remaining all is are was unit units different
distinct possible do so it we st nd rd th
"""
_FILLERS = frozenset(_FILLER_WORDS.split())
_MAX_UNIT_WORDS = 3  # more unknown words are a sentence, not a unit


def _canonical_unit(words: list[str]) -> str:
    """Return the canonical name of a unit: "km/h", "m^2", or the unknown words in order, as in "~apple"."""
    parts: list[str] = []
    unknown: set[str] = set()
    power = ""
    for i, word in enumerate(words):
        if word in _POWER_WORDS:
            power = _POWER_WORDS[word]
        elif word.startswith("^") and parts:
            parts[-1] += "^" + word[-1]
        elif word in ("/", "per"):
            parts += ["/"] if parts else []
        elif (word == "in" or word == "a") and i + 1 < len(words) and words[i + 1][0] not in "^/":
            continue
        elif (known := _known(word) or (_LETTERS.get(word, "").lower() if len(words) == 1 or parts else "")) != "":
            parts.append(known + power)
            power = ""
        elif word not in _FILLERS:
            unknown.add(word.replace(".", "").removesuffix("s"))
    if parts:
        return "".join(parts).strip("/")
    return "~" + " ".join(sorted(unknown)) if 0 < len(unknown) <= _MAX_UNIT_WORDS else ""


def have_same_unit(gold: str, answer: str) -> bool:
    """Return whether two units agree. One may be missing. Unknown units need a word in common, as in "red apples"."""
    if not gold or not answer or gold == answer:
        return True
    return gold[0] == answer[0] == "~" and bool(set(gold[1:].split()) & set(answer[1:].split()))


def join_currency(sign: str, unit: str, tail: str) -> str | None:
    """Return the unit of a value with a currency sign in front, or None if a different currency follows it."""
    currency = _UNITS.get(sign, "")
    if not currency:
        return unit
    if unit.startswith(currency):
        return unit
    if unit[:1] in _UNITS and unit[:1] != "°":
        return None
    return f"{currency}/{unit}" if unit[:1] != "~" and re.search("per|/", tail) else currency
