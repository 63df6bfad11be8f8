"""Where in a response the answer stands: five ways to look for it, each linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dapo.config import Extraction


def extract(completion: str, policies: Sequence[Extraction]) -> str | None:
    """What the first policy that finds something finds."""
    for policy in policies:
        found = _POLICIES[policy](completion)
        if found is not None:
            return found
    return None


# A label stands at the start of a line or of a sentence, markup aside. In the middle of a sentence, or in quotation
# marks, it is talk about the label: prompts say `after "Answer:"`, and responses repeat them.
_LABEL = re.compile(r"(?:answer|答案)[ \t]{0,3}(?:is[ \t]{0,3})?[*_]{0,3}[ \t]{0,3}[:：]", re.IGNORECASE)
_BEFORE_LABEL = re.compile(
    r"(?:^|[\n.!?。！？;,)\]}$*]|\b(?:so|thus|hence|therefore|the))[\s>#*_\-]{0,8}"
    r"(?:(?:the|my|final|correct|最终)[ ]?){0,3}$",
    re.IGNORECASE,
)
_HOPE = " I hope it is correct."  # what a widely used prompt has models say after their answer
_LABEL_CONTEXT = 40  # characters before a label that can matter
_LINES_TO_SKIP = 3  # an answer on its own line may come after a blank line and an opening $$ or \[
_OPENERS = re.compile(r"(?:[\s*_`]|\$\$|\\\[|\$(?=\s*$))*")
_CLOSERS = " \t\r*_`"


def _answer_line(text: str) -> str | None:
    """The line after the last label that has something on it (in a box, if there is one); the label may have the line
    above to itself."""
    for label in reversed(list(_LABEL.finditer(text))):
        before = text[max(0, label.start() - _LABEL_CONTEXT) : label.start()]
        if not _BEFORE_LABEL.search(before):
            continue
        start = label.end()
        for _ in range(1 + _LINES_TO_SKIP):
            end = text.find("\n", start)
            line = text[start : len(text) if end < 0 else end]
            line = line.removesuffix(_HOPE)
            rest = line[_match_end(_OPENERS, line) :].rstrip(_CLOSERS)
            if rest.strip("\"'.”"):
                return _boxed(rest) or _without_half_delimiters(rest)
            if end < 0:
                break
            start = end + 1
    return None


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _without_half_delimiters(line: str) -> str:
    """`34$$` and `34 \\]`: the opening half was skipped, so the closing one goes as well."""
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if line.endswith(closing) and opening not in line[: -len(closing)]:
            line = line[: -len(closing)].rstrip()
    return line


_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}(\{?)|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?[\w.,/%]+")


def _boxed(text: str) -> str | None:
    """The content of the box that is opened last, of those that are closed; `\\boxed 5` is closed by what follows."""
    depths: list[int] = []  # for each open brace: where its box's content begins, or -1 for a plain brace
    last_start, last_content = -1, None
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    for token in _BOX_TOKEN.finditer(text):
        word = token.group()
        if word == "{":
            depths.append(-1)
        elif word == "}":
            start = depths.pop() if depths else -1
            if start > last_start:
                last_start, last_content = start, (start, token.start())
        elif token.group(1):
            depths.append(token.end())
        elif token.group(1) is not None:
            bare = _BARE.match(text, token.end())
            if bare:
                last_start, last_content = token.end(), (token.end(), bare.end())
    if last_content is None:
        return None
    return text[slice(*last_content)].strip().rstrip(".,") or None


_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def _tag(text: str) -> str | None:
    """What stands between the last closing tag and the opening one before it."""
    start, found = None, None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()].strip() or None, None
    return found


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # Digits that belong to a name (x2, H2O, a_1) are not numbers; a minus after a letter, a digit or a closing bracket
    # is an operator, so that x-3 holds the number 3.
    r"(?<![A-Za-z_\\\d.])"
    r"(?P<sign>(?<![\w)\]}])[-−+])?\\?[$€£¥]?(?P<late>(?<=[$€£¥])[-−])?"
    rf"(?:(?:(?P<whole>\d+)\s?)?\\[dt]?frac\{{(?P<over>-?\d+)\}}\{{(?P<under>\d+)\}}|(?P<plain>{_DIGITS}))"
    r"(?P<slash>\s?/\s?\d+(?![\d.]))?"
    r"(?P<power>[eE][-+]?\d+(?!\w)|\s?(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?\{?-?\d+\}?)?"
    r"(?P<percent>\s?\\?[%％])?"
)


def _last_number(text: str) -> str | None:
    """The last number as it would be typed: no currency or thousands commas, `a/b` for a fraction, its percent sign."""
    last, end = None, len(text)
    while last is None and end >= 0:  # line by line from the end: most of a long response is never looked at
        start = text.rfind("\n", 0, end) + 1
        for last in _NUMBER.finditer(text, start, end):  # noqa: B007
            pass
        end = start - 1
    if last is None:
        return None
    sign = "-" if (last["sign"] or last["late"] or "") in ("-", "−") else ""
    if last["over"]:
        body = f"{last['whole'] + ' ' if last['whole'] else ''}{last['over']}/{last['under']}"
    else:
        body = last["plain"].replace(",", "")
    tail = (last["slash"] or "") + (last["power"] or "")
    return sign + body + tail.replace(" ", "") + ("%" if last["percent"] else "")


def _whole(text: str) -> str | None:
    return text.strip() or None


_POLICIES: dict[Extraction, Callable[[str], str | None]] = {
    "answer_line": _answer_line,
    "boxed": _boxed,
    "tag": _tag,
    "last_number": _last_number,
    "whole": _whole,
}
