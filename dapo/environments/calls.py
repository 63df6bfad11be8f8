"""Find the tool calls in a model's turn, in the formats that chat templates teach.

- Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them. A list of such
  objects inside the tags counts too (SmolLM2), and the last closing tag may be missing (a stop text).
- Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. Values are plain
  text, without quotes.
- Llama 3 and Mistral: the whole turn is JSON, `{"name": ..., "parameters": {...}}`, or a list of objects with
  `arguments`. A code fence around it is ignored.
- Qwen2.5-Coder often writes text around a call, which is in a code fence or in `<tools>` tags instead of its own. What
  is quoted may also be an example. So it is a call only if the JSON has exactly the keys `name` and `arguments`, and
  the name is that of a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_QUOTE = re.compile(r"(<tools>|```(?P<language>[\w-]*))\s*")
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*)</function>", re.DOTALL)
# A value may contain closing tags, as a program can: it ends where the next parameter or the end follows.
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_FORM = '{"name": ..., "arguments": {...}}'
_XML_FORM = "<function=NAME><parameter=KEY>VALUE</parameter></function>"


class Wanted(NamedTuple):
    """A tool call that the model wrote. `error` says why it cannot be made, if it cannot."""

    name: str
    arguments: dict[str, Any]
    source: str  # the arguments as text, or the whole call if it is malformed
    error: str | None = None
    is_text: bool = False  # whether the arguments are plain text, whatever their types


def find_calls(text: str, tools: Collection[str] = ()) -> list[Wanted]:
    """Return the calls of a turn in order. `tools` are the names of the tools that are offered."""
    if "<tool_call>" in text:
        return [call for body in _TAGGED.findall(text) for call in _read(body.strip())]
    return _whole_turn(text.strip()) or [_wanted(member) for member in _quoted(text, tools)]


def _whole_turn(body: str) -> list[Wanted]:
    """Return the calls of a turn that is nothing else."""
    for mark in _MARKS:
        body = body.removeprefix(mark).strip()
    if fenced := _FENCE.fullmatch(body):
        body = fenced[1]
    if not body.startswith(("{", "[")):
        return []
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return []  # not a call, but an answer that begins with a brace
    members = found if isinstance(found, list) else [found]
    is_call = bool(members) and all(isinstance(m, dict) and "name" in m and _arguments(m) is not None for m in members)
    return [_wanted(member) for member in members] if is_call else []


def _quoted(text: str, tools: Collection[str]) -> Iterator[Any]:
    """Yield the calls in code fences and in `<tools>` tags, with any text around them."""
    at = 0
    while opening := _QUOTE.search(text, at):
        closing = "</tools>" if opening[1] == "<tools>" else "```"
        try:  # not up to the closing fence, because a program among the arguments may have fences, too
            found, at = json.JSONDecoder().raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            found, at = None, opening.end()
        end = text.find(closing, at)
        end = len(text) if end < 0 else end
        if opening["language"] in (None, "", "json") and not text[at:end].strip():
            members = found if isinstance(found, list) else [found]
            if all(_names_tool(member, tools) for member in members):
                yield from members
        at = end + len(closing)


def _names_tool(member: Any, tools: Collection[str]) -> bool:
    is_call = isinstance(member, dict) and member.keys() == {"name", "arguments"} and isinstance(member["name"], str)
    return is_call and member["name"] in tools


def _read(body: str) -> list[Wanted]:
    if body.startswith("<function"):
        return [_read_xml(body)]
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [_malformed(body, f"the call is not valid JSON ({error}); write {_FORM}")]
    members = found if isinstance(found, list) else [found]
    return [_wanted(member) for member in members] or [_malformed(body, f"the call is empty; write {_FORM}")]


def _read_xml(body: str) -> Wanted:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return _malformed(body, f"the call is not complete; write {_XML_FORM}")
    name, inner, at = function[1], function[2].rstrip(), 0
    arguments: dict[str, Any] = {}
    while found := _PARAMETER.match(inner, at):
        key, value = found[1], found[2].removeprefix("\n").removesuffix("\n")
        if key in arguments:
            return Wanted(name, {}, body, f"the parameter '{key[:100]}' is given twice")
        arguments[key], at = value, found.end()
    if inner[at:].strip():
        return Wanted(name, {}, body, f"the parameters cannot be read; write {_XML_FORM}")
    return Wanted(name, arguments, json.dumps(arguments, ensure_ascii=False), is_text=True)


def _wanted(member: Any) -> Wanted:
    if not isinstance(member, dict) or not isinstance(member.get("name"), str):
        return _malformed(json.dumps(member), f"the call has no name; write {_FORM}")
    arguments = _arguments(member)
    if not isinstance(arguments, dict):
        reason = f"the call has no arguments; write {_FORM}"
        return Wanted(member["name"], {}, json.dumps(member), reason)
    return Wanted(member["name"], arguments, json.dumps(arguments, ensure_ascii=False))


def _arguments(member: dict[str, Any]) -> Any:
    found = member.get("arguments", member.get("parameters"))
    if isinstance(found, str):  # some models write the arguments as JSON text
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            return found
    return found


def _malformed(source: str, error: str) -> Wanted:
    return Wanted("", {}, source, error)
