"""Tests of tools: schemas, the formats of calls, their results and errors, and programs in the sandbox."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import pytest

from dapo.environments.calls import find_calls
from dapo.environments.environment import End
from dapo.environments.tools import MAX_CALLS, MAX_RESULT, Tool, ToolEnvironment, tools_maker
from dapo.errors import EpisodeError
from dapo.types import Prompt
from tests.environments.test_pool import TIMEOUT, opened, replies
from tests.rewards.code_hacks import SCRIPT_HACKS

FIRST = ({"role": "user", "content": "?"},)
PROMPT = Prompt("u", FIRST, (1,), answer="12")


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """Return the weather.

    It knows
    every city.

    Args:
        city: The name of the city.
        days (int): How many days.

    Returns:
        What it is like.
    """
    if days > 9:
        raise ValueError("at most 9 days")
    return {"city": city, "days": days, "unit": unit, "tags": tags}


async def later(n: int) -> str:
    """Count."""
    await asyncio.sleep(0)
    return "z" * n


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(text: str, *functions: Any) -> tuple[Any, list[Any]]:
    environment = ToolEnvironment({tool.name: tool for tool in map(Tool, functions or (weather, later))})
    return asyncio.run(environment.reply(text)), environment.calls


def test_the_schema_comes_from_signature_and_docstring():
    assert Tool(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather. It knows every city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The name of the city."},
                    "days": {"type": "integer", "default": 1, "description": "How many days."},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["city"],
            },
        },
    }


def no_hint(city):
    """Look."""


def no_docstring(city: str):
    return city


def many(*cities: str):
    """Look."""


def no_form(place: memoryview):
    """Look."""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_hint, "no type hint for 'city'"),
        (no_docstring, "has no docstring"),
        (many, r"takes '\*cities: str'"),
        (no_form, "the tool 'no_form'"),
    ],
)
def test_a_function_that_cannot_be_offered_is_refused(function, reason):
    with pytest.raises(EpisodeError, match=reason):
        Tool(function)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        'I will look.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> Wait.',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '{"name": "f", "parameters": {"a": 1}}',
        ' <|python_tag|>{"name": "f", "parameters": {"a": 1}} ',
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
    ],
)
def test_calls_are_found_in_the_formats_of_models(text):
    (found,) = find_calls(text)
    assert (found.name, found.arguments, found.error) == ("f", {"a": 1}, None)


@pytest.mark.parametrize("text", ["", "The answer is 3.", '{"answer": 3}', "{1, 2}", "[1, 2]", "[]", '{"name": "Ann"}'])
def test_an_answer_is_no_call(text):
    assert find_calls(text) == []
    assert isinstance(answered(text)[0], End)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "weather", "arguments": {"city": "Rome"}', "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "the call is empty"),
        ("5", "the call has no name"),
        ('{"name": 5, "arguments": {}}', "the call has no name"),
        ('{"name": "weather"}', "the call has no arguments"),
        ('{"name": "weather", "arguments": [1]}', "the call has no arguments"),
        ('{"name": "wether", "arguments": {}}', "there is no tool 'wether'; the tools are weather, later"),
        ('{"name": "weather", "arguments": {}}', "the argument 'city' of weather: Field required"),
        ('{"name": "weather", "arguments": {"city": "Rome", "days": "many"}}', "the argument 'days' of weather"),
        ('{"name": "weather", "arguments": {"city": "Rome", "country": "Italy"}}', "'country' of weather: Extra"),
        ('{"name": "weather", "arguments": {"city": "Rome", "days": 10}}', "ValueError: at most 9 days"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_its_error_and_counted(body, reason):
    (message,), (made,) = answered(f"<tool_call>{body}</tool_call>")
    assert message["role"] == "tool" and message["content"].startswith("Error: ") and reason in message["content"]
    assert made.error and made.result == message["content"] and made.seconds >= 0


def test_results_come_in_the_order_of_the_calls_and_long_ones_are_cut():
    text = call("weather", city="Rome") + "\n" + call("later", n=MAX_RESULT + 5)
    (first, second), (one, two) = answered(text)
    assert json.loads(first["content"].replace("'", '"').replace("None", "null"))["city"] == "Rome"
    assert first["name"] == one.name == "weather" and json.loads(one.arguments) == {"city": "Rome"} and not one.error
    assert second["content"] == "z" * MAX_RESULT + "\n... 5 more characters" and not two.error


def test_a_flood_of_calls_is_answered_up_to_a_limit():
    messages, calls = answered(call("later", n=MAX_RESULT) * 1000)
    assert [made.error for made in calls] == [False] * MAX_CALLS + [True]
    assert "at most 8 calls" in messages[-1]["content"]


def test_the_functions_of_a_file_are_its_tools(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from json import dumps\n\ndef add(a: int, b: int) -> int:\n    '''Add.'''\n    return a + b\n\n"
        "def _helper():\n    pass\n\ndef hang() -> None:\n    '''Wait.'''\n    while True:\n        pass\n"
    )
    assert [tool["function"]["name"] for tool in tools_maker(f"tools:{path}:add").tools] == ["add"]
    with closing(opened(f"tools:{path}")) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["add", "hang"]
        first, last = replies(pool, [call("add", a=2, b=3), "It is 5."])
        assert first.messages == ({"role": "tool", "name": "add", "content": "5"},)
        assert [made.result for made in first.calls] == ["5"] and not first.calls[0].error
        assert last.ended and last.score is None  # the run's reward judges the text
        (cut_off,) = replies(pool, [call("hang")])
        assert cut_off.score.error == "timed out after 1 s"
    path.write_text("import json\nx = 1\n")
    with pytest.raises(EpisodeError, match="has no function that could be a tool"):
        opened(f"tools:{path}")


def test_what_is_only_thought_is_not_called(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def add(a: int, b: int) -> int:\n    '''Add.'''\n    return a + b\n")
    made, thought = call("add", a=2, b=3), f"Maybe {call('add', a=1, b=1)}, but no."
    coded = "<tool_call><function=add><parameter=a>2</parameter><parameter=b>3</parameter></function></tool_call>"
    fenced = 'So:\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```'
    opening = replace(PROMPT, opens_thought=True)  # as the chat template does
    with closing(opened(f"tools:{path}", think_tags=["<think>", "</think>"])) as pool:
        for text, prompt, results in [
            (f"<think>{thought}</think>Answer: 5", PROMPT, []),
            (f"<think>{thought}</think>{made}", PROMPT, ["5"]),
            ('<think>hm</think>{"name": "add", "arguments": {"a": 2, "b": 3}}', PROMPT, ["5"]),
            (f"<think>{thought}", PROMPT, []),  # a thought that does not end
            (thought, opening, []),
            (f"{thought}</think>{made}", opening, ["5"]),
            (f"<think>{coded}</think>Answer: 5", PROMPT, []),
            (f"<think>{thought}</think>{coded}", PROMPT, ["5"]),
            (f"<think>{fenced}</think>Answer: 5", PROMPT, []),
            (f"<think>hm</think>{fenced}", PROMPT, ["5"]),
        ]:
            (reply,) = replies(pool, [text], prompt=prompt)
            assert [each.result for each in reply.calls] == results


@pytest.fixture(scope="module")
def python():
    with closing(opened("python", max_turns=99)) as pool:
        yield pool


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(3 * 4)", "12"),
        ("```python\nprint(3 * 4)\n```", "12"),
        ("x = 3", "(The program printed nothing. Use print.)"),
        ("print(1)\n1 / 0", "Error: ZeroDivisionError: division by zero\n1"),
        ("x =", "Error: SyntaxError: invalid syntax"),
        ("print(1)\nwhile True: pass", "Error: timeout: the programs of a turn may use 1 s"),
        ("import os; os._exit(0)", "(The program printed nothing. Use print.)"),
        ("print(input())", "Error: EOFError: EOF when reading a line"),
        ("x = bytearray(2**34)", "Error: memory: MemoryError"),
    ],
)
def test_a_program_runs_and_its_output_is_the_result(python, code, result):
    (reply,) = replies(python, [call("python", code=code)])
    assert reply.messages[0]["content"] == result
    assert reply.calls[0].error == result.startswith("Error")


def test_a_program_that_floods_its_output_is_stopped(python):
    (reply,) = replies(python, [call("python", code="while True: print('x' * 1000)")])
    assert reply.calls[0].error and "output: it wrote more than" in reply.messages[0]["content"]
    assert len(reply.messages[0]["content"]) < MAX_RESULT + 100


def test_programs_of_one_turn_share_its_time(python):
    (reply,) = replies(python, [call("python", code="while True: pass") * MAX_CALLS])
    assert "timeout" in reply.calls[0].result and "timeout" in reply.calls[-1].result
    assert sum(made.seconds for made in reply.calls) < 4 * TIMEOUT


def test_what_a_model_writes_runs_in_the_sandbox_only(python, tmp_path):
    mark = tmp_path / "mark"
    hacks = [f"open({str(mark)!r}, 'w').write('x')", f"import os; os.system('touch {mark}')", *SCRIPT_HACKS]
    texts = [call("python", code=hack) for hack in hacks]
    # The same programs where they are no calls of a tool.
    texts += [hacks[0], f"```python\n{hacks[0]}\n```", call(hacks[0]), f"<tool_call>{hacks[0]}</tool_call>"]
    for index, text in enumerate(texts):
        (reply,) = replies(python, [text], (0, index))
        assert reply.score is None, reply.score
    assert not mark.exists()
