"""The `code` rule: run the response's program against the row's tests, in a sandbox.

The tests are pairs of standard input and output, or assertions that call the program's functions. A program that
crashes, hangs, or fills memory or its output is wrong. Only a row without usable tests, or a failure of the sandbox
itself, leaves a response unjudged.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dapo.config import RewardConfig
from dapo.rewards.sandbox.sandbox import WALL_FACTOR, Ending, Sandbox

_PYTHON = ("python", "python3", "py")
_FENCE = re.compile(r"\s*(```+|~~~+)\s*([\w+-]*)")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")  # never backtracks far: outputs can be long
_TOLERANCE = 1e-6  # relative or absolute, where the expected output has a decimal fraction
# Arguments are JSON values in such rows, where a tuple is a list; some rows put the result into a list of its own.
_CALL = """
try:
    _function = NAME
except NameError:
    _function = Solution().NAME

def _plain(value):
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value

def _check(arguments, expected):
    result = _plain(_function(*arguments))
    assert result == expected or [result] == expected, f"got {result!r:.200}, expected {expected!r:.200}"
"""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts for standard input, each with the standard output that is expected."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class Assertions:
    """Tests as Python code. `entry_point`: the function that the prompt begins and the program has to complete."""

    tests: tuple[str, ...]
    setup: str = ""
    entry_point: str | None = None

    def __len__(self) -> int:
        return len(self.tests)


class CodeRule:
    """The rule as a function of a response and its row. The sandbox's process starts with the first program."""

    patience = WALL_FACTOR + 1  # the rule keeps reward.timeout itself; the pool waits this many times as long

    def __init__(self, options: RewardConfig) -> None:
        self.timeout, self.scoring = options.timeout, options.code_score
        self.sandbox = Sandbox(memory_gb=options.memory_gb, is_unsafe_allowed=options.code_unsafe)

    def __call__(
        self, completion: str, answer: Any = None, prompt: Any = (), *, test: Any = None, entry_point: Any = None,
        test_list: Any = None, test_setup_code: Any = None, test_imports: Any = None, input_output: Any = None,
        tests: Any = None, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        # The columns are named, so that two rows with one question and different tests are not taken for duplicates.
        row = {
            "test": test, "entry_point": entry_point, "test_list": test_list, "test_setup_code": test_setup_code,
            "test_imports": test_imports, "input_output": input_output, "tests": tests,
        }  # fmt: skip
        tests = read_tests(answer, row)
        program = find_program(completion)
        if program is None:
            return self._outcome(0, len(tests), "no program", "")
        if isinstance(tests, Pairs):
            return self._run_pairs(program, tests)
        return self._run_assertions(program, tests, prompt)

    def _run_pairs(self, program: str, tests: Pairs) -> dict[str, Any]:
        passed, reason, detail = 0, None, ""
        # All tests share the time. Otherwise a program could spend it again in each, until the pool gives up on it.
        cpu, deadline = self.timeout, time.monotonic() + self.timeout * WALL_FACTOR
        for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
            ending = self.sandbox.run_script(program, stdin, len(expected), cpu, deadline - time.monotonic())
            cpu -= ending.cpu
            if ending.reason is None and is_same_output(ending.output.decode(errors="replace"), expected):
                passed += 1
            elif reason is None:
                reason, detail = ending.reason or "wrong answer", ending.detail
            if cpu <= 0 or ending.reason == "timeout" or (reason is not None and self.scoring == "all"):
                break
        if passed < len(tests) and reason is None:
            reason, detail = "timeout", f"its tests used more than {self.timeout:g} s of CPU time"
        return self._outcome(passed, len(tests), reason, detail)

    def _run_assertions(self, program: str, tests: Assertions, prompt: Any) -> dict[str, Any]:
        setup, names = tests.setup, None
        if tests.entry_point is not None:
            begun = begun_code(prompt, tests.entry_point)
            program = complete(begun, program, tests.entry_point)
            setup, names = f"{begun}\n{setup}", [tests.entry_point]
        job = {"setup": setup, "tests": tests.tests, "names": names}
        results, ending = self.sandbox.run_tests(program, job, self.timeout, self.timeout * WALL_FACTOR)
        failures = [result for result in results if result is not None]
        for kind, text in failures:
            if kind == "impossible":
                raise ValueError(f"the row's tests cannot be run: {text}")
        passed = len(results) - len(failures)
        if passed == len(tests):
            return self._outcome(passed, len(tests), None, "")
        reason, detail = _why(failures, ending)
        return self._outcome(passed, len(tests), reason, detail)

    def _outcome(self, passed: int, tests: int, reason: str | None, detail: str) -> dict[str, Any]:
        is_right = passed == tests
        score = passed / tests if self.scoring == "share" else float(is_right)
        return {"score": score, "acc": is_right, "passed": passed, "tests": tests, "reason": reason, "detail": detail}


def _why(failures: Sequence[Sequence[str]], ending: Ending) -> tuple[str, str]:
    if ending.reason is not None:
        return ending.reason, ending.detail
    text = failures[0][1] if failures else "the tests did not run to their end"
    return ("wrong answer" if text.startswith("AssertionError") else "raised"), text


def find_program(text: str) -> str | None:
    """Return the last fenced block of Python, or the whole text if it has no fence. A block may lack its end."""
    blocks: list[tuple[str, list[str]]] = []
    fence, has_fence = None, False
    for line in text.splitlines():
        match = _FENCE.match(line)
        if fence is None and match:
            fence, has_fence = match[1], True
            blocks.append((match[2].lower(), []))
        elif fence is not None and line.strip().startswith(fence):
            fence = None
        elif fence is not None:
            blocks[-1][1].append(line)
    if not has_fence:
        return text if text.strip() else None
    for wanted in (_PYTHON, ("",)):  # a block that names no language counts only where none is Python
        for language, lines in reversed(blocks):
            if language in wanted:
                return "\n".join(lines)
    return None


def is_same_output(output: str, expected: str) -> bool:
    """Compare line by line, ignoring whitespace at the ends of lines and empty lines at the end."""
    lines, expected_lines = (
        [line.rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n")] for text in (output, expected)
    )
    return len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def _is_same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words, expected_words = line.split(), expected.split()
    has_decimals = any("." in word and _DECIMAL.fullmatch(word) for word in expected_words)
    return has_decimals and len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected or not _DECIMAL.fullmatch(word) or not _DECIMAL.fullmatch(expected):
        return False
    return math.isclose(float(word), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def begun_code(prompt: Any, entry_point: str) -> str:
    """Return the code in the prompt that begins the function: imports, helpers and its head, from any text around it.

    It is the first longest run of lines that is Python and defines the function.
    """
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for text in reversed(texts):
        for part in (find_program(text) if _FENCE.search(text) else None, text):
            if part is not None and (code := _defining(part, entry_point)):
                return code
    return ""


@lru_cache(maxsize=1024)
def _defining(text: str, name: str) -> str:
    lines = text.splitlines()
    starts = [
        place for place, line in enumerate(lines) if re.match(r"(from|import|def|class|async|@|[A-Za-z_]+ ?=)", line)
    ]
    for start in starts[:50]:
        for end in range(len(lines), start, -1):
            code = "\n".join(lines[start:end]) + "\n"
            if _defines(code, name):
                return code
    return ""


def _defines(code: str, name: str) -> bool:
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name for node in body
    )


def complete(begun: str, program: str, entry_point: str) -> str:
    """Return the whole program: after the begun code if it defines the function itself, else as the function's body.

    The program is not parsed here: that can crash Python, and has to happen in the sandbox.
    """
    is_whole = re.search(
        rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{entry_point}\b|^{entry_point}[ \t]*=", program, re.MULTILINE
    )
    return f"{begun}\n\n{program}" if is_whole else begun + program


def read_tests(answer: Any, row: Mapping[str, Any]) -> Pairs | Assertions:
    """Return the row's tests. They are in columns as HumanEval and MBPP have them, or in the gold answer.

    The gold answer, which may be JSON text, is a mapping with `inputs` and `outputs` (and `fn_name`, if a function is
    called with each input), or with the columns above; a list of such pairs `input` and `output`; or a list of
    assertions. Raises ValueError if there are no tests.
    """
    if isinstance(row.get("test"), str):
        return _humaneval(row["test"], row.get("entry_point"))
    if row.get("test_list"):
        setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
        return _assertions(row["test_list"], "\n".join(setup))
    found = next((row[name] for name in ("input_output", "tests") if row.get(name)), answer)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = [found] if "assert" in found else found
    match found:
        case {"inputs": [_, *_] as inputs, "outputs": list(outputs)} if len(inputs) == len(outputs):
            return _pairs(inputs, outputs, found.get("fn_name"))
        case {"test": str()} | {"test_list": [_, *_]}:
            return read_tests(None, found)
        case [{"input": _, "output": _}, *_] if all(
            isinstance(t, dict) and {"input", "output"} <= t.keys() for t in found
        ):
            first = found[0]
            function = first.get("fn_name") or (first.get("metadata") or {}).get("func_name")
            return _pairs([test["input"] for test in found], [test["output"] for test in found], function)
        case [str(), *_]:
            return _assertions(found)
    shown = repr(answer) if len(repr(answer)) <= 100 else repr(answer)[:97] + "..."
    raise ValueError(
        f"the gold answer is {shown}; code expects a mapping with inputs and outputs, a list of assertions, or the "
        "columns test and entry_point, or test_list"
    )


def _humaneval(test: str, entry_point: Any) -> Assertions:
    if not entry_point:
        return _assertions([test])
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise ValueError(f"the column entry_point is {entry_point!r}; expected the name of a function")
    _parse(test)
    if not _defines(test, "check"):
        raise ValueError("the column test does not define the function check")
    return Assertions((f"check({entry_point})",), test, entry_point)


def _assertions(tests: Sequence[Any], setup: str = "") -> Assertions:
    for code in (setup, *tests):
        _parse(code)
    return Assertions(tuple(tests), setup)


def _parse(code: Any) -> None:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the gold answer is not a test in Python: {str(code)[:100]!r} ({error})") from None


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: Any) -> Pairs | Assertions:
    if not function:
        return Pairs(tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)))
    calls = [_as_call(arguments, expected) for arguments, expected in zip(inputs, outputs, strict=True)]
    return _assertions(
        [f"_check({arguments!r}, {expected!r})" for arguments, expected in calls], _CALL.replace("NAME", function)
    )


def _as_call(arguments: Any, expected: Any) -> tuple[list[Any], Any]:
    """Return arguments and result; some datasets have them as text, one JSON value per line."""
    if isinstance(arguments, str):
        return [json.loads(line) for line in arguments.splitlines() if line.strip()], json.loads(expected)
    return list(arguments), expected


def _as_text(value: Any) -> str:
    """Return one text; some datasets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
