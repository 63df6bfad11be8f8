"""Tests of calls in XML, and of calls that are quoted with text around them."""

from __future__ import annotations

import inspect
import json
from datetime import date
from typing import Any

import pytest

from dapo.environments.calls import find_calls
from tests.environments.test_tools import answered

FENCED = '```json\n{"name": "f", "arguments": {"a": 1}}\n```'
XML = """<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    "text",
    [
        f"I will look it up.\n\n{FENCED}\n\nThen I will answer.",
        f"First a program:\n```python\nprint(1)\n```\nNow the call:\n{FENCED}",
        'Let me see.\n```\n{"name": "f", "arguments": {"a": 1}}\n```',
        'Let me see.\n```json\n{"name": "f", "arguments": {"a": 1}}',  # the turn ends before the fence does
        'Let me see.\n```json\n[{"name": "f", "arguments": {"a": 1}}]\n```',
        'To find out:\n<tools>\n{"name": "f", "arguments": {"a": 1}}\n</tools>\nWait.',
        '<tools>{"name": "f", "arguments": {"a": 1}}</tools>',
    ],
)
def test_a_quoted_call_of_an_offered_tool_is_a_call_with_text_around_it(text):
    (found,) = find_calls(text, ["f", "g"])
    assert (found.name, found.arguments, found.error) == ("f", {"a": 1}, None)
    assert find_calls(text, ["g"]) == []


def test_quoted_calls_keep_their_order_and_may_contain_fences():
    program = "print('''\n```\n''')"
    second = json.dumps({"name": "g", "arguments": {"code": program + "```"}})
    found = find_calls(f"One:\n{FENCED}\nTwo:\n```json\n{second}\n```", ["f", "g"])
    assert [(each.name, each.arguments) for each in found] == [("f", {"a": 1}), ("g", {"code": program + "```"})]


@pytest.mark.parametrize(
    "text",
    [
        'The tool takes {"name": "f", "arguments": {"a": 1}}, as I said.',  # neither fence nor tags
        'As it was:\n```json\n{"name": "f", "arguments": {"a": 1}, "result": 3}\n```',
        'The tool:\n```json\n{"name": "f", "description": "F.", "parameters": {}}\n```',
        'The tools:\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>',
        'For example:\n```python\n{"name": "f", "arguments": {"a": 1}}\n```',
        'Done:\n```json\n{"name": "f", "arguments": {"a": 1}}\nand so on\n```',
        'Broken:\n```json\n{"name": "f", "arguments": {"a": 1}\n```',
        'Names:\n```json\n{"name": ["f"], "arguments": {}}\n```',
        "```json\n" + "[" * 100_000,
        '```python\nprint(1)\n```\n{"name": "f", "arguments": {"a": 1}}',  # after a fence, not in one
    ],
)
def test_what_is_quoted_but_no_call_of_an_offered_tool_is_an_answer(text):
    assert find_calls(text, ["f"]) == []


def test_a_quoted_call_with_arguments_of_the_wrong_kind_is_answered_with_its_error():
    (message,), (made,) = answered('So:\n```json\n{"name": "weather", "arguments": ["Rome"]}\n```')
    assert "the call has no arguments" in message["content"] and made.error


def test_with_calls_in_tags_quoted_ones_are_not_made():
    text = f'As in\n{FENCED}\nI call\n<tool_call>{{"name": "f", "arguments": {{"a": 2}}}}</tool_call>'
    assert [each.arguments for each in find_calls(text, ["f"])] == [{"a": 2}]


def test_a_call_of_qwen3_coder_is_read_by_the_types_of_the_tool():
    (found,) = find_calls(XML)
    assert (found.name, found.arguments, found.error) == ("weather", {"city": "Rome", "days": "3"}, None)
    (message,), (made,) = answered(f"I will look.\n{XML}")
    assert message["content"] == "{'city': 'Rome', 'days': 3, 'unit': 'C', 'tags': None}" and not made.error
    assert json.loads(made.arguments) == {"city": "Rome", "days": "3"}
    assert answered(XML.removesuffix("\n</tool_call>"))[0] == [message]
    assert answered(XML + "\n" + XML)[0] == [message, message]


def kinds(
    text: str = "",
    count: int = 0,
    share: float = 0.0,
    flag: bool = False,
    items: list[int] | None = None,
    table: dict[str, int] | None = None,
    maybe: str | None = "unset",
    day: date | None = None,
    anything: Any = 0,
) -> str:
    """Return what was given."""
    return repr({name: value for name, value in locals().items() if value != DEFAULTS[name]})


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(kinds).parameters.items()}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "3", "3"),
        ("text", "null", "null"),
        ("text", "{}", "{}"),
        ("text", "\n  x = 1\n\n  y = 2\n\n", "  x = 1\n\n  y = 2\n"),  # one line break is removed on each side
        ("text", "a < b && '</parameter>' != '<p>'", "a < b && '</parameter>' != '<p>'"),
        ("text", "</function>", "</function>"),
        ("count", "\n7\n", 7),
        ("share", "0.5", 0.5),
        ("share", "2", 2.0),
        ("flag", "true", True),
        ("flag", "True", True),
        ("items", "[1, 2]", [1, 2]),
        ("table", '{"a": 1}', {"a": 1}),
        ("maybe", "null", None),
        ("maybe", "None of them", "None of them"),
        ("day", "2026-01-31", date(2026, 1, 31)),
        ("anything", "[1", "[1"),
    ],
)
def test_values_in_xml_are_converted_to_the_types_of_the_parameters(name, text, value):
    call = f"<tool_call><function=kinds><parameter={name}>{text}</parameter></function></tool_call>"
    (message,), (made,) = answered(call, kinds)
    assert (message["content"], made.error) == (repr({name: value}), False)


CITY = "<parameter=city>Rome</parameter>"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"<function=weather>\n{CITY}", "the call is not complete; write <function=NAME><parameter=KEY>"),
        ("<function>weather</function>", "the call is not complete"),
        ("<function=weather>Rome</function>", "the parameters cannot be read; write <function=NAME>"),
        ("<function=weather><parameter=city>Rome</function>", "the parameters cannot be read"),
        (f"<function=weather>{CITY}!</function>", "the parameters cannot be read"),
        (f"<function=weather>{CITY}{CITY}</function>", "the parameter 'city' is given twice"),
        ("<function=wether></function>", "there is no tool 'wether'; the tools are weather, later"),
        ("<function=weather></function>", "the argument 'city' of weather: Field required"),
        (f"<function=weather>{CITY}<parameter=days>many</parameter></function>", "the argument 'days' of weather"),
        (f"<function=weather>{CITY}<parameter=land>Italy</parameter></function>", "'land' of weather: Extra"),
        (f"<function=weather>{CITY}<parameter=days>10</parameter></function>", "ValueError: at most 9 days"),
    ],
)
def test_a_call_in_xml_that_cannot_be_made_is_answered_with_its_error_and_counted(body, reason):
    (message,), (made,) = answered(f"<tool_call>\n{body}\n</tool_call>")
    assert message["role"] == "tool" and message["content"].startswith("Error: ") and reason in message["content"]
    assert made.error and made.result == message["content"]


def test_a_flood_of_tags_is_an_answer_or_a_malformed_call():
    for part in ("<parameter=a>", "<parameter=a></parameter>", "```json ", "<tools>[", "</parameter> "):
        text = "<tool_call><function=f>" + part * 20_000 + "</function></tool_call>"
        assert find_calls(text)[0].error
        assert find_calls(part * 20_000, ["f"]) == []
