"""Call a program's functions from tests in another process.

Assertions that shared a process with the program could be read, replaced or answered by an object that equals
everything. Here the program sees only the arguments of a call, and the tests see only plain values: numbers, text,
lists, tuples, sets and mappings. Any other object stays where it is, and the tests hold a `Remote` that refers to it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

MAX_MESSAGE = 16 * 2**20  # bytes
ENDED = "the program ended, or returned too much"
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def serve(namespace: dict[str, Any], peer: int) -> None:
    """Answer calls until the tests end. Object 0 is the program's namespace."""
    objects: list[Any] = [namespace]

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    for line in os.fdopen(peer, "rb", closefd=False):
        try:
            operation, number, *rest = json.loads(line)
            arguments = [decode(value, objects.__getitem__) for value in rest]
            reply = ["value", encode(_perform(operation, objects[number], arguments), keep), None]
        except Exception as error:
            reply = ["error", _builtin_name(error), str(error)[:500]]
        _send(peer, reply)


def _perform(operation: str, target: Any, arguments: list[Any]) -> Any:
    if operation == "call":
        positional, named = arguments
        return target(*positional, **named)
    if operation == "list":
        return list(target)
    if operation == "set":
        return setattr(target, *arguments)
    return target[arguments[0]] if isinstance(target, dict) else getattr(target, arguments[0])


def _builtin_name(error: Exception) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


class NotPlain(Exception):
    """A test passes an object that cannot leave the tests' process."""


class Remote:
    """An object of the program, as the tests see it."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self._number, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._number, name, value)

    def __iter__(self) -> Any:
        return iter(self._program.ask("list", self._number))


class Program:
    """The program's process, as the tests see it."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.has_ended = False
        self.lines = os.fdopen(peer, "rb", closefd=False)

    def function(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self.ask("get", 0, name)(*arguments, **named)

    def ask(self, operation: str, number: int, *arguments: Any) -> Any:
        _send(self.peer, [operation, number, *(encode(value, _refuse) for value in arguments)])
        line = self.lines.readline(MAX_MESSAGE)
        if not line.endswith(b"\n"):
            self.has_ended = True
            raise RuntimeError(ENDED)
        kind, first, second = json.loads(line)
        if kind == "error":
            raise _exception(first)(second)
        return decode(first, lambda number: Remote(self, number))


def _exception(name: object) -> Callable[[str], Exception]:
    """Return the built-in exception of this name, unless raising it could end a loop of the tests early."""
    kind = vars(builtins).get(str(name))
    ends_loops = ("StopIteration", "StopAsyncIteration")
    return kind if name not in ends_loops and isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def check(job: Mapping[str, Any], peer: int, results: int) -> None:
    """Run the tests one after the other and send for each of them null, or what was raised: ["failed", text].

    ["impossible", text] says that a test cannot be run in this way, whatever the program does.
    """
    program, names = Program(peer), job["names"]
    namespace: dict[str, Any] = {"__name__": "tests"}
    with suppress(Exception):
        program.ask("get", 0, "__name__")  # answered when the program has been loaded
    failure = _run(job["setup"], namespace, program if names is None else None)
    if failure is not None and names is not None:
        failure[0] = "impossible"  # the setup does not know the program yet
    for name in names or ():
        # What the tests mean is the program's function, and not its head in the setup.
        namespace[name] = program.function(name)
    for test in job["tests"]:
        result = failure or _run(test, namespace, program if names is None else None)
        # A test that expects an exception must not take the end of the program for one.
        _send(results, ["failed", ENDED] if result is None and program.has_ended else result)


def _run(source: str, namespace: dict[str, Any], program: Program | None) -> list[str] | None:
    """Run code. Names that it does not define are looked up in the program, if there is one."""
    try:
        tree = ast.parse(source)
        nodes = [*ast.walk(tree)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        modules = {
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for name in sorted(names - namespace.keys() - vars(builtins).keys()):
            if name in modules & sys.stdlib_module_names:
                namespace[name] = importlib.import_module(name)  # never the program's `math`, which can lie
            elif program is not None:
                with suppress(KeyError):  # the tests define it themselves, or fail with a NameError
                    namespace[name] = program.ask("get", 0, name)
        exec(compile(tree, "tests.py", "exec"), namespace)
    except NotPlain as error:
        return ["impossible", str(error)]
    except BaseException as error:  # also SystemExit: a test that did not run to its end has not passed
        return ["failed", f"{type(error).__name__}: {error}"[:500]]
    return None


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return a JSON form of plain values. What is not plain goes to `keep`, which returns a number for it."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 and hasattr(value, "item"):
        value = value.item()  # numpy's False must not become an object, which is true
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and hasattr(value, "hex"):  # floats, also those of numpy; not fractions
        return float(value)
    if isinstance(value, list):
        return [encode(member, keep) for member in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(member, keep)] for key, member in value.items()]}
    if isinstance(value, (tuple, set, frozenset)):
        name = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
        return {name: [encode(member, keep) for member in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    return {"object": keep(value)}


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [decode(member, find) for member in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode(key, find): decode(member, find) for key, member in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(member, find) for member in content)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes(content)
    return find(content)


def _refuse(value: Any) -> int:
    if isinstance(value, Remote):
        return value._number
    raise NotPlain(f"a test passes an object of type {type(value).__name__} to the program; use plain values")


def _send(descriptor: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
