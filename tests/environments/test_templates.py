"""Tools and several turns in the chat templates of real models, which are taken from the package trl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from dapo.environments.tools import Tool
from dapo.errors import ConfigError
from dapo.model.template import TurnTemplate, check_template_tools
from tests.tiny import tiny_tokenizer

FOUND = find_spec("trl")
pytestmark = pytest.mark.skipif(FOUND is None, reason="the templates are those of trl")
RESULTS = [{"role": "tool", "name": "add", "content": "12"}, {"role": "tool", "name": "add", "content": "13"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tokenizer_of(name):
    assert FOUND is not None and FOUND.origin is not None
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = Path(FOUND.origin).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("qwen2_5", "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response><|im_end|>\n"),
        ("qwen3", "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response><|im_end|>\n"),
        ("llama3_1", 'ipython<|end_header_id|>\n\n"12"<|eot_id|>'),
    ],
)
def test_templates_of_models_offer_tools_and_take_their_results(name, given):
    tokenizer, schema = tokenizer_of(name), Tool(add).schema
    check_template_tools(tokenizer)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tools=[schema], add_generation_prompt=True, tokenize=False
    )
    assert "Add two numbers." in prompt
    assert given in tokenizer.decode(TurnTemplate(tokenizer, {}, [schema]).between(RESULTS, -1))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill", "gptoss"])
def test_templates_that_change_earlier_turns_are_refused(name):
    with pytest.raises(ConfigError, match="cannot be continued token by token"):
        TurnTemplate(tokenizer_of(name))
