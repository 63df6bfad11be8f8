"""Find the answer in a response: five extraction policies, each linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dapo.config import Extraction


def extract(completion: str, policies: Sequence[Extraction]) -> str | None:
    """Return the answer found by the first policy that finds one."""
    for policy in policies:
        found = _POLICIES[policy](completion)
        if found is not None:
            return found
    return None


HYPHENS = "−‐‑‒–﹣－"  # a minus sign, and hyphens that are written for one
_INVISIBLE = re.compile(
    r"[\u00ad\u034f\u061c\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb]+"
)


def without_invisible(text: str) -> str:
    """Remove zero-width spaces and joiners, soft hyphens, direction marks and variation selectors."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


# A label counts only at the start of a line or sentence, apart from markup. In quotation marks or inside a sentence it
# is a mention: prompts say `after "Answer:"`, and responses repeat that.
_LABEL = re.compile(r"(?:answer|答案)[ \t]{0,3}(?:is[ \t]{0,3})?[*_]{0,3}[ \t]{0,3}[:：]", re.IGNORECASE)
_BEFORE_LABEL = re.compile(
    r"(?:^|<answer>|[\n.!?。！？;,)\]}$*]|\b(?:so|thus|hence|therefore|the))[\s>#*_\-]{0,8}"
    r"(?:(?:the|my|final|correct|最终)[ ]?){0,3}$",
    re.IGNORECASE,
)
_PROMPTED_SUFFIX = " I hope it is correct."  # a widely used few-shot prompt makes models append this
_LABEL_CONTEXT = 40  # characters before a label that are checked
_MAX_OPEN_LINES = 20  # of an answer whose box or matrix has several lines
_BOX = "\\boxed"
_MAX_SKIPPED_LINES = 3  # an answer on its own line may come after a blank line and an opening $$ or \[
_OPENERS = re.compile(r"(?:[\s*_`]|\$\$|\\\[|\$(?=\s*$))*")
_CLOSERS = " \t\r*_`"


def _answer_line(text: str) -> str | None:
    """Return the text after the last label that has any, or the content of the box in that text.

    The label may stand on a line of its own, as a heading. Then the answer is the last box below it, or the next line.
    """
    text = without_invisible(text)
    for label in reversed(list(_LABEL.finditer(text))):
        before = text[max(0, label.start() - _LABEL_CONTEXT) : label.start()]
        if not _BEFORE_LABEL.search(before):
            continue
        start = label.end()
        for _ in range(1 + _MAX_SKIPPED_LINES):
            end = text.find("\n", start)
            line = text[start : len(text) if end < 0 else end]
            line = _TAG.sub(" ", line.removesuffix(_PROMPTED_SUFFIX))
            rest = line[_match_end(_OPENERS, line) :].rstrip(_CLOSERS)
            if rest.strip("\"'.”"):
                is_heading = start > label.end()
                box = _boxed(text[start:]) if is_heading else _boxed(rest)
                return box or _without_half_delimiters(_with_next_lines(text, start, rest))
            if end < 0:
                break
            start = end + 1
    return None


def _with_next_lines(text: str, start: int, line: str) -> str:
    """Return the line, or the content of its box, with the next lines if a box or an environment is open at its end."""
    end = text.find("\n", start)
    for _ in range(_MAX_OPEN_LINES):
        shown = text[start : len(text) if end < 0 else end]
        has_open_box = _BOX in shown and _boxed(shown) is None
        if not has_open_box and shown.count("\\begin") <= shown.count("\\end"):
            if "\n" not in shown:
                return line
            return _boxed(shown) or shown[_match_end(_OPENERS, shown) :].rstrip(_CLOSERS + "\n")
        if end < 0:
            break
        end = text.find("\n", end + 1)
    return line


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _without_half_delimiters(line: str) -> str:
    """Remove a closing delimiter whose opening half was skipped, as in `34$$` and `34 \\]`."""
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if line.endswith(closing) and opening not in line[: -len(closing)]:
            line = line[: -len(closing)].rstrip()
    return line


_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}(\{?)|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?[\w.,/%]+")


def _boxed(text: str) -> str | None:
    """Return the content of the box that opens last, among those that are closed.

    A box without braces, as in `\\boxed 5`, ends with its number or word.
    """
    open_braces: list[int] = []  # per open brace: where the content of its box starts, or -1 for a plain brace
    last_start, last_content = -1, None
    if _BOX not in text and "\\fbox" not in text:
        return None
    for token in _BOX_TOKEN.finditer(text):
        word = token.group()
        if word == "{":
            open_braces.append(-1)
        elif word == "}":
            start = open_braces.pop() if open_braces else -1
            if start > last_start:
                last_start, last_content = start, (start, token.start())
        elif token.group(1):
            open_braces.append(token.end())
        elif token.group(1) is not None:
            bare = _BARE.match(text, token.end())
            if bare:
                last_start, last_content = token.end(), (token.end(), bare.end())
    if last_content is None:
        return None
    return text[slice(*last_content)].strip().rstrip(".,") or None


_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def _tag(text: str) -> str | None:
    """Return the text between the last closing tag and the opening tag before it."""
    start, found = None, None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()].strip() or None, None
    return found


# Up to 40 groups of three: without a bound, a response that repeats `123,456,` takes time with its length squared.
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,40}(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # Digits inside a name (x2, H2O, a_1) are not numbers. A minus after a letter, digit or closing bracket is an
    # operator, so the number in x-3 is 3.
    r"(?<![A-Za-z_\\\d.])"
    rf"(?P<sign>(?<![\w)\]}}])[-+{HYPHENS}])?\\?[$€£¥]?(?P<inner_sign>(?<=[$€£¥])[-{HYPHENS}])?"
    rf"(?:(?:(?P<whole>\d+)\s?)?\\[dt]?frac\{{(?P<over>-?\d+)\}}\{{(?P<under>\d+)\}}|(?P<plain>{_DIGITS}))"
    r"(?P<slash>\s?/\s?\d+(?![\d.]))?"
    r"(?P<power>[eE][-+]?\d+(?!\w)|\s?(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?\{?-?\d+\}?)?"
    r"(?P<percent>\s?\\?[%％])?"
)


def _last_number(text: str) -> str | None:
    """Return the last number in plain form: no currency sign or thousands commas, `a/b` for a fraction, `%` kept."""
    text = without_invisible(text)
    last, end = None, len(text)
    while last is None and end >= 0:  # line by line from the end, because the answer is usually there
        start = text.rfind("\n", 0, end) + 1
        for last in _NUMBER.finditer(text, start, end):  # noqa: B007
            pass
        end = start - 1
    if last is None:
        return None
    sign = "-" if (last["sign"] or last["inner_sign"] or "+") != "+" else ""
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
