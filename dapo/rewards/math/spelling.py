"""Normalize the spelling of an answer: delimiters, spacing, fractions, signs, percent, degrees."""

from __future__ import annotations

import re
import unicodedata

from dapo.rewards.extract import HYPHENS, extract, without_invisible
from dapo.rewards.math.units import CHANGING_WORDS

_SIGNS = {
    "-": HYPHENS + "—―⁃﹘",
    "/": "÷⁄∕",
    ":": "∶ː",
    "'": "’′",
    "\\times ": "×✕",
    "\\cdot ": "·⋅∙",
    "\\pi ": "π",
    "\\sqrt ": "√",
    "\\infty ": "∞",
    "\\theta ": "θ",
    "^": "ˆ",
    " 1/2": "½",
    " 1/3": "⅓",
    " 2/3": "⅔",
    " 1/4": "¼",
    " 3/4": "¾",
    ",": "、，",
    ".": "。",
    "°": "º˚",
    "°C": "℃",
    "°F": "℉",
    "": "⟦⟧⦃⦄¤",  # removed from the input, because they are used below as marks: ⟦words⟧, ⦃sets⦄ and ¤ for dollars
}
_CHARACTERS = str.maketrans({sign: spelling for spelling, signs in _SIGNS.items() for sign in signs})
_CHARACTERS |= {0xFF01 + i: 0x21 + i for i in range(94)}  # full-width forms
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def plain_characters(text: str) -> str:
    """Return the text without invisible characters, and with ASCII hyphens, digits and spaces."""
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀-₉]+", lambda match: f"_{{{match.group().translate(_SUBSCRIPTS)}}}", text)
    text = without_invisible(text).translate(_CHARACTERS)
    return "".join(map(_plain, text))


def _plain(character: str) -> str:
    kind = "" if character.isascii() else unicodedata.category(character)
    return " " if kind == "Zs" else str(unicodedata.digit(character)) if kind == "Nd" else character


# Formatting commands and alternative spellings. The order matters.
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{\s?(\{[^{}]*\})\s?\}", r"\1"),  # {{1}} is {1}
        (r"\{\s?\\(?:bf|bfseries|rm|it)(?![a-zA-Z])\s?([^{}]*)\}", r"⟦\1⟧"),
        (r"\\(?:bf|bfseries|boldmath|large|Large|LARGE|huge|Huge)(?![a-zA-Z])", " "),
        (r"\\(?:text|math)dollar(?![a-zA-Z])\s?|\\text\s?\{\s?¤\s?\}", "¤"),
        (r"\\\\\[\s?-?[\d.]+\s?[a-z]{2}\s?\]", r"\\\\"),  # end of a matrix row with extra space
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"\{,\}|,\s?\\!", ","),
        (r"\{([.:])\}", r"\1"),
        (r"(\\times|\\cdot|\*)\s?\{10\}", r"\1 10"),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ","),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s?\.?", ""),
        # a matrix in brackets that are written apart from it
        (
            r"[(\[]\s?\\begin\s?\{(array|smallmatrix)\}(?:\s?\{[lcr|\s]*\})?(.*?)\\end\s?\{\1\}\s?[)\]]",
            r"\\begin{pmatrix}\2\\end{pmatrix}",
        ),
        (r"\\phantom\s?(?:\{[^{}]*\}|-)|\\(?:displaystyle|textstyle|limits|hfill)(?![a-zA-Z])|\\!", ""),
        (r"(?<!\\)\\[,;:\s]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"(\.\d*)\\(?:bar|overline)\s?(?:\{(\d+)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"(\.\d{3,})\s?(?:\\[lc]?dots|…)\s?$", r"\1"),
        (r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(?:\s?(\d)|\s([a-zA-Z]))\s?(?=\{)", r"\\frac{\1\2}"),
        (r"\\frac\s?(\{[^{}]*\})\s?([\da-zA-Z])", r"\\frac\1{\2}"),
        (r"\\frac\s?(\\[a-zA-Z]+)\s?([\da-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s?(\d)\s?([a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s?(\d|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
        (r"\\(?:text(?:bf|it|rm|normal|sf)?|math(?:rm|bf|it|sf)|mbox|operatorname)\*?\s?\{([^{}]*)\}", r"⟦\1⟧"),
        (r"⟦\s?([-+]?\d[\d.,]*|[ie])\s?⟧", r"\1"),  # numbers, and i and e, are no words
        (r"\\(?:le|leq|leqslant)(?![a-zA-Z])|<=", "≤"),
        (r"\\(?:ge|geq|geqslant)(?![a-zA-Z])|>=", "≥"),
        (r"\\(?:lt)(?![a-zA-Z])|&lt;", "<"),
        (r"\\(?:gt)(?![a-zA-Z])|&gt;", ">"),
        (r"\\(?:ne|neq)(?![a-zA-Z])|!=", "≠"),
        (r"\\approx(?![a-zA-Z])|≃|\\simeq(?![a-zA-Z])", "≈"),
        (r"\\(?:big)?cup(?![a-zA-Z])|(?<=[)\]])\s?U\s?(?=[(\[])", "∪"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", "⟦or⟧"),
        (r"\\in(?![a-zA-Z])", "∈"),
        (r"\\pm(?![a-zA-Z])|\+/-", "±"),
        (r"\\(?:\{|lbrace(?![a-zA-Z]))", "⦃"),
        (r"\\(?:\}|rbrace(?![a-zA-Z]))", "⦄"),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])|∅|(?i:⟦?\s?(?:the )?(?:empty|null) set\s?⟧?)", "⦃⦄"),
        (r"⦃\s?[a-z]\s?(?:[:|∣]|\\mid(?![a-zA-Z]))([^⦃⦄|]*[<>≤≥≠][^⦃⦄|]*)⦄", r"\1"),  # {x : x < 5}
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\s?\^\s?(?:\\circ(?![a-zA-Z])|\{\s?\\circ\s?\}|°)|\\degree(?![a-zA-Z])", "°"),
        (r"°\s?(?:⟦\s?)?([CF])(?:\s?⟧)?(?![a-zA-Z⟧])", r"°⟦\1⟧"),
        (r"(?<![a-zA-Z}])\(\s?([\dA-Z]*\d[\dA-Z]*)\s?\)(?=\s?_)", r"\1"),  # (101)_2
        (r"(?<=[\dA-Z])[(⟦\s]{0,4}(?:in )?base[\s⟧]{1,3}(\d{1,2})\s?[)⟧]{0,2}$", r"_{\1}"),
        (r"\\%", "%"),
        (r"(?i)\s?(?:⟦\s?)?(?<![a-z])(?:percent|per cent|percentage|pct\.?)(?![a-z])(?:\s?⟧)?", "%"),
        (r"(?i)(?<![\\a-z])(?:infinity|infty|inf)(?![a-z])", r"\\infty "),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (
            r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?![a-zA-Z])",
            r"\\\1",
        ),
        (r"\\sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"\\mathbb\s?\{?R\}?", r"(-\\infty,\\infty)"),
        (r"\\(?:blacksquare|square|Box|checkmark|qed)(?![a-zA-Z])\s?$", ""),
        (r"\s+", " "),
    )
)
_BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_COLORED = re.compile(r"\\(?:text)?color\s?\{[a-zA-Z]+\}")
_STYLED = re.compile(rf"\\(?:boldsymbol|bm|pmb|underline|emph|texttt|ensuremath)\s?{_BRACED}")
_TEXT = re.compile(rf"\\(?:text(?:bf|it|rm|normal|sf)?|math(?:rm|bf|it|sf)|mbox)\s?{_BRACED}")
_LEAD_IN = re.compile(
    r"(?i)^(?:=|(⟦\s?)?(?:(?:so|thus|hence|therefore),? )?(?:the |my |our )?(?:final |correct )?"
    r"(?:answer|result|solution|value)(?: is| are|:| =)+\s?:?(?(1)\s?⟧))"
)
_LABEL = re.compile(r"⟦([a-zA-Z ]+):\s?⟧")  # as in \\text{Total: } 34
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TRAILING = " \t.,;:*_`\"'\\✓✔☑✅🎉■□◼◻∎"


def clean(text: str) -> str:
    """Return the answer in its normal spelling."""
    text = plain_characters(text).strip(" \t\n*_`\"'")
    if "\\boxed" in text or "\\fbox" in text:
        text = extract(text, ("boxed",)) or text
    text = text.rstrip(_TRAILING)
    plain = text[1:-1] if text[:1] == text[-1:] == "$" else text
    if _PLAIN_NUMBER.fullmatch(plain):  # the common case, which the steps below would not change
        return plain
    text = _without_styles(_without_delimiters(text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if text.startswith("⟦") and text.find("⟧") == len(text) - 1:  # all of it is in \\text{}
        text = text[1:-1].strip()
    label = _LABEL.match(text)
    if label and not CHANGING_WORDS & set(label[1].lower().split()):
        text = text[label.end() :]
    return _LEAD_IN.sub("", text).strip().rstrip(_TRAILING)


def _without_styles(text: str) -> str:
    """Remove colors and bold letters, and \\text{} around formulas. A style can be inside of another."""
    if "{" not in text:
        return text
    text = _COLORED.sub("", text)
    for _ in range(2):
        text = _STYLED.sub(r"\1", text)
        text = _TEXT.sub(lambda match: match[1] if re.search(r"\\[a-zA-Z]", match[1]) else match[0], text)
    return text


def _without_delimiters(text: str) -> str:
    """Remove the $ around formulas, and write ¤ for each $ that means dollars: \\$5, and $5 without a second $."""
    text = text.replace("\\$", "¤").replace("$$", " ")
    dollars = text.count("$")
    if dollars == 1:
        text = re.sub(r"\$(?=\s?-?[\d.])", "¤", text)
    return text.replace("$", " ")
