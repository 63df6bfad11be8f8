"""Find the tool calls in a model's turn, in the formats that chat templates teach.

- Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them. A list of such
  objects inside the tags counts too (SmolLM2), and the last closing tag may be missing (a stop text).
- Llama 3 and Mistral: the whole turn is JSON, `{"name": ..., "parameters": {...}}`, or a list of objects with
  `arguments`. A code fence around it is ignored (Qwen2.5-Coder).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_FORM = '{"name": ..., "arguments": {...}}'


class Wanted(NamedTuple):
    """A tool call that the model wrote. `error` says why it cannot be made, if it cannot."""

    name: str
    arguments: dict[str, Any]
    source: str  # the arguments as text, or the whole call if it is malformed
    error: str | None = None


def find_calls(text: str) -> list[Wanted]:
    """Return the calls of a turn in order."""
    if "<tool_call>" in text:
        return [call for body in _TAGGED.findall(text) for call in _read(body.strip())]
    body = text.strip()
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


def _read(body: str) -> list[Wanted]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [_malformed(body, f"the call is not valid JSON ({error}); write {_FORM}")]
    members = found if isinstance(found, list) else [found]
    return [_wanted(member) for member in members] or [_malformed(body, f"the call is empty; write {_FORM}")]


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
