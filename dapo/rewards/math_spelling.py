"""Normalize the spelling of an answer: delimiters, spacing, fractions, signs, percent, degrees."""

from __future__ import annotations

import re

from dapo.rewards.extract import extract

_SIGNS = {
    "-": "−–",
    "/": "÷⁄",
    "\\times ": "×",
    "\\cdot ": "·",
    "\\pi ": "π",
    "\\sqrt ": "√",
    "\\infty ": "∞",
    "^2": "²",
    "^3": "³",
    " 1/2": "½",
    " 1/4": "¼",
    " 3/4": "¾",
    ",": "、",
    ".": "。",
    " ": "\u00a0\u2009",
    "": "⟦⟧⦃⦄",  # removed from the input, because they are used below as marks: ⟦words⟧ and ⦃sets⦄
}
_CHARACTERS = str.maketrans({sign: spelling for spelling, signs in _SIGNS.items() for sign in signs})
_CHARACTERS |= {0xFF01 + i: 0x21 + i for i in range(94)}  # full-width forms
# Formatting commands and alternative spellings. The order matters.
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\[[^\]]{0,9}\]", r"\\\\"),  # end of a matrix row with extra space
        (r"(?<!\\)\\[()\[\]]|\\?\$+|[€£¥]", " "),
        (r"\{,\}|,\s?\\!", ","),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ","),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s?\.?", ""),
        (r"\\phantom\s?(?:\{[^{}]*\}|-)|\\(?:displaystyle|textstyle|limits|hfill)(?![a-zA-Z])|\\!", ""),
        (r"(?<!\\)\\[,;:\s]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(?:\s?(\d)|\s([a-zA-Z]))\s?(?=\{)", r"\\frac{\1\2}"),
        (r"\\frac\s?(\{[^{}]*\})\s?([\da-zA-Z])", r"\\frac\1{\2}"),
        (r"\\frac\s?(\\[a-zA-Z]+)\s?([\da-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s?(\d)\s?([a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s?(\d|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
        (r"\\(?:text(?:bf|it|rm|normal|sf)?|math(?:rm|bf|it|sf)|mbox|operatorname)\*?\s?\{([^{}]*)\}", r"⟦\1⟧"),
        (r"\\(?:le|leq|leqslant)(?![a-zA-Z])|<=", "≤"),
        (r"\\(?:ge|geq|geqslant)(?![a-zA-Z])|>=", "≥"),
        (r"\\(?:lt)(?![a-zA-Z])|&lt;", "<"),
        (r"\\(?:gt)(?![a-zA-Z])|&gt;", ">"),
        (r"\\(?:ne|neq)(?![a-zA-Z])|!=", "≠"),
        (r"\\approx(?![a-zA-Z])|≃|\\simeq(?![a-zA-Z])", "≈"),
        (r"\\cup(?![a-zA-Z])", "∪"),
        (r"\\in(?![a-zA-Z])", "∈"),
        (r"\\pm(?![a-zA-Z])|\+/-", "±"),
        (r"\\(?:\{|lbrace(?![a-zA-Z]))", "⦃"),
        (r"\\(?:\}|rbrace(?![a-zA-Z]))", "⦄"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\s?\^\s?(?:\\circ(?![a-zA-Z])|\{\s?\\circ\s?\}|°)|\\degree(?![a-zA-Z])", "°"),
        (r"\\%", "%"),
        (r"(?i)\s?(?:⟦\s?)?(?<![a-z])(?:percent|per cent|percentage|pct\.?)(?![a-z])(?:\s?⟧)?", "%"),
        (r"(?i)(?<![\\a-z])(?:infinity|infty|inf)(?![a-z])", r"\\infty "),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?![a-zA-Z])", r"\\\1"),
        (r"\\sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"\\mathbb\s?\{?R\}?", r"(-\\infty,\\infty)"),
        (r"\s+", " "),
    )
)
_LEAD_IN = re.compile(
    r"(?i)^(?:(?:so|thus|hence|therefore),? )?(?:the |my |our )?(?:final |correct )?"
    r"(?:answer|result|solution|value)(?: is| are|:| =)+\s?:?"
)
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TRAILING = " \t.,;:*_`\"'"


def clean(text: str) -> str:
    """Return the answer in its normal spelling."""
    text = text.strip(" \t\n*_`\"'").translate(_CHARACTERS)
    if "\\boxed" in text or "\\fbox" in text:
        text = extract(text, ("boxed",)) or text
    text = text.rstrip(_TRAILING)
    plain = text.strip("$ ")
    if _PLAIN_NUMBER.fullmatch(plain):  # the common case, which the steps below would not change
        return plain
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return _LEAD_IN.sub("", text.strip()).strip().rstrip(_TRAILING)
