"""The environments `tools:` and `python`: the model calls functions, and its last turn is its answer.

A turn with calls is answered with their results. A turn without a call ends the episode, and the run's `reward` judges
its text. A call that cannot be made, or that fails, gets an error message as its result, so that the model can react.
What a model only thinks (`reward.think_tags`) is not called.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from dapo.config import TOOLS
from dapo.config.base import is_file_function
from dapo.config.functions import load_function, load_module
from dapo.environments.calls import Wanted, find_calls
from dapo.environments.environment import USE, End, Maker, finished
from dapo.environments.protocol import Message, ToolCall
from dapo.errors import EpisodeError
from dapo.rewards.code import find_program
from dapo.rewards.sandbox.sandbox import WALL_FACTOR, Sandbox, SandboxError

MAX_CALLS = 8  # in one turn
MAX_RESULT = 2**12  # characters of a result: those of MAX_CALLS calls fit into a reply
_SECTION = re.compile(r"^\s*(?:args|arguments|parameters|returns?|yields|raises|examples?):?\s*$", re.IGNORECASE)
_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


class ToolError(Exception):
    """A call that failed; the text is the result that the model sees."""


class Tool:
    """A function with the JSON schema made from its signature, type hints and docstring."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        where = f"{USE}: the tool '{self.name}'"
        summary, described = _docstring(inspect.getdoc(function) or "")
        if not summary:
            raise EpisodeError(f"{where} has no docstring; the model needs a sentence about what it does")
        self.model = _parameters(function, where)
        try:
            schema = self.model.model_json_schema()
        except (PydanticUserError, ValueError) as error:
            raise EpisodeError(f"{where} has a parameter without a JSON form ({str(error).splitlines()[0]})") from None
        properties = {name: _without_title(value) for name, value in schema.get("properties", {}).items()}
        for name, text in described.items():
            if name in properties:
                properties[name] = {**properties[name], "description": text}
        parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        self.schema = {
            "type": "function",
            "function": {"name": self.name, "description": summary, "parameters": parameters},
        }

    async def call(self, arguments: Mapping[str, Any], *, is_text: bool = False) -> str:
        """Call the function and return its result as text. `is_text`: read arguments by the types of the parameters."""
        if is_text:
            arguments = {name: self._read(name, text) for name, text in arguments.items()}
        try:
            checked = self.model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ToolError(f"the argument '{place}' of {self.name}: {first['msg']}") from None
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        try:
            return str(await finished(self.function(**values)))
        except (ToolError, SandboxError):
            raise
        except Exception as error:  # the model's arguments may be out of range: it gets to know, and may try again
            raise ToolError(f"{type(error).__name__}: {str(error)[:500]}") from None

    def _read(self, name: str, text: str) -> Any:
        """Return an argument that was written as text: itself if the parameter takes it, else what it is as JSON."""
        if name not in self.model.model_fields:
            return text
        annotation: Any = self.model.model_fields[name].annotation
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        values: list[Any] = [None] if text.strip() in ("null", "None") else []
        for value in (*values, text):
            try:
                return adapter.validate_python(value, strict=True)
            except ValidationError:
                pass
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # a date, or a boolean as Python writes it; or a mistake, which the check reports


def _parameters(function: Callable[..., Any], where: str) -> type[BaseModel]:
    """Return a model of the parameters, which validates arguments and has their schema."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, SyntaxError, TypeError, ValueError) as error:
        raise EpisodeError(f"{where} has a type hint that cannot be read ({error})") from None
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EpisodeError(f"{where} takes '{parameter}'; a tool needs parameters that have names")
        if parameter.annotation is parameter.empty:
            raise EpisodeError(f"{where} has no type hint for '{parameter.name}', which its schema needs")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    try:
        return create_model(function.__name__, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
    except (PydanticUserError, NameError, ValueError, TypeError) as error:
        raise EpisodeError(f"{where} cannot be offered ({str(error).splitlines()[0]})") from None


def _without_title(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section (Args, Returns), and the descriptions of parameters in it."""
    lines = text.splitlines()
    end = next((place for place, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    found = (_PARAMETER.match(line) for line in lines[end:])
    return " ".join(" ".join(lines[:end]).split()), {match[1]: match[2].strip() for match in found if match}


class ToolEnvironment:
    """One episode with tools. `calls` are those of the turns that were answered, for the record."""

    def __init__(self, tools: Mapping[str, Tool], *, before_turn: Callable[[], None] = lambda: None) -> None:
        self.tools, self.before_turn = tools, before_turn
        self.calls: list[ToolCall] = []

    async def reply(self, text: str) -> list[Message] | End:
        wanted = find_calls(text, self.tools)
        if not wanted:
            return End()
        self.before_turn()
        messages: list[Message] = []
        for place, each in enumerate(wanted[: MAX_CALLS + 1]):
            start = time.monotonic()
            try:
                result, failed = _shortened(await self._result(each, place)), False
            except ToolError as error:
                result, failed = _shortened(f"Error: {error}"), True
            self.calls.append(
                ToolCall(each.name[:100], each.source[:MAX_RESULT], result, time.monotonic() - start, failed)
            )
            messages.append({"role": "tool", "name": each.name[:100] or "unknown", "content": result})
        return messages

    async def _result(self, wanted: Wanted, place: int) -> str:
        if place >= MAX_CALLS:
            raise ToolError(f"a turn may have at most {MAX_CALLS} calls; the others were not made")
        if wanted.error is not None:
            raise ToolError(wanted.error)
        if wanted.name not in self.tools:
            raise ToolError(f"there is no tool '{wanted.name[:100]}'; the tools are {', '.join(self.tools)}")
        return await self.tools[wanted.name].call(wanted.arguments, is_text=wanted.is_text)

    def cut_off(self) -> End:
        return End()


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}\n... {len(text) - MAX_RESULT:,} more characters"


class PythonTool:
    """The tool `python`. The programs of one turn share its time: `timeout` seconds of CPU time."""

    def __init__(self, timeout: float, *, memory_gb: float, is_unsafe_allowed: bool) -> None:
        self.timeout = timeout
        self.sandbox = Sandbox(memory_gb=memory_gb, is_unsafe_allowed=is_unsafe_allowed)
        self.sandbox.open()  # refuses to run without isolation
        self.cpu, self.deadline = 0.0, 0.0

    def before_turn(self) -> None:
        self.cpu, self.deadline = self.timeout, time.monotonic() + self.timeout * WALL_FACTOR

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: The whole program. Use print() to see results.
        """
        left = self.deadline - time.monotonic()
        if self.cpu <= 0 or left <= 0:
            raise self._timed_out()
        ending = self.sandbox.run_script(find_program(code) or "", "", 0, self.cpu, left)
        self.cpu -= ending.cpu
        output = ending.output.decode(errors="replace").rstrip("\n")
        if ending.reason == "timeout":  # what it printed until then depends on the machine's speed
            raise self._timed_out()
        if ending.reason is not None:
            reason = ending.detail if ending.reason == "raised" else f"{ending.reason}: {ending.detail}"
            raise ToolError("\n".join(filter(None, [reason, output])))
        return output or "(The program printed nothing. Use print.)"

    def _timed_out(self) -> ToolError:
        return ToolError(f"timeout: the programs of a turn may use {self.timeout:g} s")


def python_maker(timeout: float, memory_gb: float, *, is_unsafe_allowed: bool) -> Maker:
    runner = PythonTool(timeout, memory_gb=memory_gb, is_unsafe_allowed=is_unsafe_allowed)
    tools = {"python": Tool(runner.python)}
    maker = Maker(lambda row: ToolEnvironment(tools, before_turn=runner.before_turn), is_async=False)
    maker.tools, maker.patience = [tool.schema for tool in tools.values()], WALL_FACTOR + 1
    maker.reads_thoughts = False
    return maker


def tools_maker(spec: str) -> Maker:
    """Return the maker for `tools:path/to/file.py`, or `tools:path/to/file.py:NAME` for one function or a list."""
    tools = {tool.name: tool for tool in map(Tool, _functions(spec.removeprefix(TOOLS)))}
    is_async = any(inspect.iscoroutinefunction(tool.function) for tool in tools.values())
    maker = Maker(lambda row: ToolEnvironment(tools), is_async=is_async)
    maker.tools, maker.reads_thoughts = [tool.schema for tool in tools.values()], False
    return maker


def _functions(spec: str) -> Sequence[Callable[..., Any]]:
    if is_file_function(spec):
        return [load_function(spec, USE, EpisodeError)]
    module = load_module(spec, USE, EpisodeError)
    found = [value for name, value in vars(module).items() if _is_tool(name, value, module)]
    if not found:
        raise EpisodeError(f"{USE}: {Path(spec).name} has no function that could be a tool: one without a leading _")
    return found


def _is_tool(name: str, value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
