"""Reads the options that a shell script gives to verl, without running anything.

It knows what launch scripts use: assignments, `export`, arrays, quotes, continued lines, comments, here-documents,
${name}, ${name:-default}, ${name,,} and $((arithmetic)). A command substitution has an unknown value. Branches are not
decided: assignments inside `if`, `for` and the like count as if they were made, and are reported.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dapo.config.migration.words import Unclosed, commands, end_of_bracket, end_of_quote, split_words
from dapo.errors import ConfigError

UNKNOWN = "\ufffd"  # stands in a value for a part that is not known
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPTION = re.compile(r"\+{0,2}([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"(\d*|&)(>>?|<)(&\d+)?")
_ENTRY = re.compile(r"(^|[./])(main_(ppo|dapo)\w*|fully_async_main|recipe\.[\w.]*main_\w+)(\.py)?$")
_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "select"}, {"fi", "done", "esac"}
_DECLARING = {"export", "declare", "typeset", "local", "readonly"}
_BEFORE_COMMAND = {*_OPENING, *_DECLARING, "then", "do", "else", "elif", "{", "!", "time", "exec"}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # bash rounds toward 0
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}
_LARGEST = 2**63
_MAX_DEPTH = 20  # of substitutions inside substitutions
_MAX_SHOWN = 80  # characters of a word in a note
_MAX_VALUE = 2**18  # characters; x="$x$x" doubles


@dataclass(frozen=True, slots=True)
class Script:
    """The options that a script passes to verl."""

    options: dict[str, str]  # by verl's name; UNKNOWN where a part of the value is not known
    notes: list[str]  # what is not certain about them


def read_script(text: str, source: str, environment: Mapping[str, str]) -> Script:
    """Return the options of the first call of verl in a script."""
    reader = _Reader(environment)
    try:
        reader.run(text, source)
    except Unclosed:  # inside a value; `commands` names the line otherwise
        raise ConfigError(f"{source}: a quote or a bracket is not closed") from None
    except RecursionError:
        raise ConfigError(f"{source}: quotes and brackets are nested too deeply") from None
    if not reader.calls:
        raise ConfigError(
            f"{source}: found no call of verl; expected a line such as `python3 -m verl.trainer.main_ppo key=value`"
        )
    line, words, notes = reader.calls[0]
    if len(reader.calls) > 1:
        lines = ", ".join(str(number) for number, _, _ in reader.calls)
        notes.insert(0, f"the script calls verl {len(reader.calls)} times (lines {lines}); this is the first call")
    options = {}
    for word in words:
        if found := _OPTION.fullmatch(word):
            options[found[1]] = found[2]
        elif word.startswith(("--config-name", "--config-path", "-cn", "-cp")):
            notes.append(f"line {line} has {word}; the options in that file are not read: convert it, too")
        elif word.strip():
            shown = " ".join(word.replace(UNKNOWN, "?").split())[:_MAX_SHOWN]
            notes.append(f"line {line} gives verl '{shown}', which is not an option that could be read")
    return Script(options, notes)


def _without_redirections(words: list[str]) -> list[str]:
    """Leave out `> file`, `2>&1` and the like."""
    marks = [_REDIRECTION.match(word) for word in words]
    targets = {place + 1 for place, mark in enumerate(marks) if mark and mark.end() == len(words[place])}
    return [word for place, word in enumerate(words) if not marks[place] and place not in targets]


class _Reader:
    """Follows the assignments of a script, and collects the calls of verl."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.values: dict[str, list[str]] = {}  # an array has any number of words, a variable has one
        self.doubts: dict[str, dict[str, None]] = {}  # variable -> notes about its value, in order
        self.collected: dict[str, None] = {}  # notes about the values that were used since this was last cleared
        self.calls: list[tuple[int, list[str], list[str]]] = []  # line, arguments, notes
        self.depth = 0

    def run(self, text: str, source: str) -> None:
        branches = 0
        for line, tokens in commands(text, source):
            branches += (tokens[0] in _OPENING) - (tokens[0] in _CLOSING)
            while tokens and (tokens[0] in _BEFORE_COMMAND or (tokens[0].startswith("-") and "=" not in tokens[0])):
                tokens = tokens[1:]
            while tokens and (found := _ASSIGNMENT.match(tokens[0])):
                self._assign(found[1], tokens[0][found.end() :], bool(found[2]), line if branches > 0 else None)
                tokens = tokens[1:]
            if tokens:
                self._look_for_call(line, tokens, source)

    def _assign(self, name: str, text: str, is_added: bool, branch_line: int | None) -> None:
        self.collected = dict(self.doubts.get(name, {})) if is_added else {}
        earlier = self.values.get(name, []) if is_added else []
        if text.startswith("("):
            self.values[name] = earlier + [word for token in split_words(text[1:-1]) for word in self._expand(token)]
        else:
            self.values[name] = [("".join(earlier) + self._substitute(text))[:_MAX_VALUE]]
        if branch_line is not None:
            shown = " ".join(self.values[name])[:80]
            self.collected[f"line {branch_line} sets {name} inside a branch, which is taken as done: '{shown}'"] = None
        self.doubts[name] = self.collected

    def _look_for_call(self, line: int, tokens: list[str], source: str) -> None:
        """Note a call of verl, made directly or in a wrapper such as `ray job submit --` or `bash -c`."""
        self.collected = {}
        words = [word for token in _without_redirections(tokens) for word in self._expand(token)]
        if not words or words[0] in ("echo", "printf"):
            return
        entry = next((i for i, word in enumerate(words) if _ENTRY.search(word)), None)
        if entry is not None and any("python" in word or "torchrun" in word for word in words[:entry]):
            self.calls.append((line, words[entry + 1 :], list(self.collected)))
        elif self.depth < _MAX_DEPTH:
            self.depth += 1
            for word in words:
                if "main_" in word and re.search(r"\s", word):
                    self.run(word, source)
            self.depth -= 1

    def _expand(self, token: str) -> list[str]:
        """Return the words that a token stands for: one, except for arrays, bare variables and "$@"."""
        if array := re.fullmatch(r'"?\$\{([A-Za-z_]\w*)\[[@*]\][^}]*\}"?', token):
            self.collected.update(self.doubts.get(array[1], {}))
            return list(self.values.get(array[1], []))
        if re.fullmatch(r'"?\$(?:[@*]|\{[@*][^}]*\})"?', token):
            self.collected["the arguments of the script ($@) are passed on to verl, and are not known here"] = None
            return []
        text = self._substitute(token)
        return text.split() if re.fullmatch(r"\$\{?[A-Za-z_]\w*\}?", token) else [text]

    def _substitute(self, token: str, in_quotes: bool = False) -> str:
        """Remove quotes, and put in the values of variables."""
        if self.depth > _MAX_DEPTH:
            return UNKNOWN
        self.depth += 1
        text, place = [], 0
        while place < len(token):
            char = token[place]
            if char == "'" and not in_quotes:
                end = end_of_quote(token, place)
                text.append(token[place + 1 : end])
                place = end
            elif char == '"':
                in_quotes = not in_quotes
            elif char == "\\" and place + 1 < len(token):
                place += 1
                kept = "\\" if in_quotes and token[place] not in '$`"\\\n' else ""
                text.append(kept + token[place].replace("\n", ""))
            elif char == "`":
                place = end_of_quote(token, place)
                text.append(UNKNOWN)
            elif char == "$":
                value, place = self._dollar(token, place, in_quotes)
                text.append(value)
            else:
                text.append(char)
            place += 1
        self.depth -= 1
        return "".join(text)

    def _dollar(self, token: str, place: int, in_quotes: bool) -> tuple[str, int]:
        """Return the value of what begins with the dollar sign at `place`, and where it ends."""
        if token.startswith(("$(", "${"), place):
            end = end_of_bracket(token, place + 1, in_quotes)
            inside = token[place + 2 : end]
            if token[place + 1] == "{":
                return self._parameter(inside, in_quotes), end
            if inside.startswith("(") and inside.endswith(")"):
                return self._arithmetic(inside[1:-1]), end
            return "." if inside.strip() == "pwd" else UNKNOWN, end
        if found := _NAME.match(token, place + 1):
            return self._value(found[0]), found.end() - 1
        is_special = place + 1 < len(token) and (token[place + 1].isdigit() or token[place + 1] in "@*#?$")
        return (UNKNOWN, place + 1) if is_special else ("$", place)

    def _parameter(self, text: str, in_quotes: bool) -> str:
        """Return the value of ${text}: plain, with a default, or in small or capital letters."""
        found = re.fullmatch(r"([A-Za-z_]\w*|\d+)(?:(:?[-=?+])(.*)|(,,|\^\^))?", text, re.DOTALL)
        if not found:
            return UNKNOWN  # ${name%pattern}, ${#name} and the like
        name, sign, default, letters = found.groups()
        if sign and sign[-1] == "+":
            return self._substitute(default, in_quotes) if self._value(name) not in ("", UNKNOWN) else ""
        value = self._value(name)
        if (value == UNKNOWN and sign in ("-", "=", ":-", ":=")) or (not value and sign in (":-", ":=")):
            value = self._substitute(default, in_quotes)
        return value.lower() if letters == ",," else value.upper() if letters == "^^" else value

    def _value(self, name: str) -> str:
        if name in self.values:
            self.collected.update(self.doubts.get(name, {}))
            return (self.values[name] or [""])[0]
        if name in ("HOME", "PWD"):
            return "~" if name == "HOME" else "."
        if self.environment.get(name):
            self.collected[f"{name} comes from the environment"] = None
            return self.environment[name]
        return UNKNOWN

    def _arithmetic(self, text: str) -> str:
        """Return the value of an expression of whole numbers, or UNKNOWN."""
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text)
        plain = _NAME.sub(lambda found: f"({self._value(found[0])})", names)
        if UNKNOWN in plain or len(plain) > 500:
            return UNKNOWN
        try:
            return str(_evaluate(ast.parse(plain.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    else:
        raise ValueError
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError
    return value
