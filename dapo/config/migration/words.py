"""Cuts a shell script into commands and words, with their quotes and substitutions left in place."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dapo.errors import ConfigError

_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_PAIRS = {"(": ")", "{": "}"}


def commands(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every simple command with the number of its first line."""
    try:
        yield from _commands(text)
    except Unclosed as error:
        line = text.count("\n", 0, error.place) + 1
        raise ConfigError(f"{source}: line {line}: {text[error.place]} is not closed") from None


def split_words(text: str) -> list[str]:
    """Return the words of an array's parentheses, which may be on several lines."""
    return [word for _, words in _commands(text) for word in words]


def end_of_bracket(text: str, place: int, in_quotes: bool = False) -> int:
    """Return where the bracket at `place` closes, skipping quotes and nested brackets.

    Between double quotes, ' has no meaning in ${...}.
    """
    opening, closing, depth, at = text[place], _PAIRS[text[place]], 0, place
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == '"' or (char == "'" and not (in_quotes and opening == "{")):
            at = end_of_quote(text, at)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise Unclosed(place)


class Unclosed(Exception):
    """A quote or bracket without its end."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place


def end_of_quote(text: str, place: int) -> int:
    quote, at = text[place], place + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\":
            at += 1
        elif quote == '"' and text.startswith(("$(", "${"), at):
            at = end_of_bracket(text, at + 1, in_quotes=True)
        at += 1
    if at >= len(text):
        raise Unclosed(place)
    return at


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    words: list[str] = []
    line, place, first_line, end_marks = 1, 0, 1, []
    while place <= len(text):
        char = text[place] if place < len(text) else "\n"
        if char in "\n;&|()" and not text.startswith("&>", place):
            if words:
                yield first_line, words
                words = []
            if char == "\n":
                line += 1
                for mark in end_marks:
                    skipped = _skip_here_document(text, place + 1, mark)
                    line += text.count("\n", place + 1, skipped)
                    place = skipped - 1
                end_marks = []
            place += 1
        elif text.startswith("\\\n", place):
            line += 1
            place += 2
        elif char in " \t\r":
            place += 1
        elif char == "#":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        elif found := _HERE_DOCUMENT.match(text, place):
            end_marks.append(found[2])
            place = found.end()
        else:
            end = _end_of_word(text, place)
            first_line = first_line if words else line
            words.append(text[place:end].replace("\\\n", ""))
            line += text.count("\n", place, end)
            place = end


def _skip_here_document(text: str, place: int, mark: str) -> int:
    """Return the place after the line that ends a here-document."""
    found = re.compile(rf"^\t*{mark}$", re.MULTILINE).search(text, place)
    return len(text) if found is None else min(len(text), found.end() + 1)


def _end_of_word(text: str, place: int) -> int:
    at = place
    while at < len(text):
        char = text[at]
        if char in " \t\r\n;|)" or (
            char == "&" and text[at - 1 : at] not in (">", "<") and text[at + 1 : at + 2] != ">"
        ):
            return at
        if char == "\\":
            at += 1
        elif char in "'\"`":
            at = end_of_quote(text, at)
        elif text.startswith(("$(", "${"), at) or (char == "(" and text[at - 1 : at] == "=" and at > place):
            at = end_of_bracket(text, at + (char == "$"))
        elif char == "(" or (char == "<" and _HERE_DOCUMENT.match(text, at)):
            return at
        at += 1
    return min(at, len(text))
