"""The tokens between two turns, and the templates that cannot be continued."""

from __future__ import annotations

import pytest

from dapo.errors import ConfigError
from dapo.model.template import TurnTemplate
from tests.tiny import CHAT_TEMPLATE, EOS_ID, tiny_tokenizer

# As Qwen3 does: the thought of a turn is kept only after the last question, and the results of tools are no questions.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def with_template(text):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


def rendered(tokenizer, *messages):
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def test_the_tokens_are_those_that_the_template_puts_between_two_turns():
    tokenizer = tiny_tokenizer()
    template = TurnTemplate(tokenizer)
    for turn, replies in [("6", [user("higher")]), ("x\ny", [user("a"), user("<|im_end|> b")])]:
        sampled = [*tokenizer.encode(turn), EOS_ID]
        whole = rendered(tokenizer, user("guess"), {"role": "assistant", "content": turn}, *replies)
        assert [*rendered(tokenizer, user("guess")), *sampled, *template.between(replies, EOS_ID)] == whole


def test_a_turn_that_did_not_end_itself_is_ended():
    template = TurnTemplate(tiny_tokenizer())
    assert template.between([user("on")], 77) == (EOS_ID, *template.between([user("on")], EOS_ID))


def test_a_template_that_strips_earlier_thoughts_is_refused_unless_only_tools_reply():
    tokenizer = with_template(THINKING)
    with pytest.raises(ConfigError, match="changes earlier turns"):
        TurnTemplate(tokenizer)
    template = TurnTemplate(tokenizer, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tokenizer.decode(template.between([{"role": "tool", "content": "9"}], EOS_ID)) == (
        "\n<|im_start|>tool\n9<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no chat template"),
        (CHAT_TEMPLATE.replace("{{ message['role'] }}", "{{ loop.revindex }}"), "changes earlier turns"),
        (CHAT_TEMPLATE + "{{ messages|length }}", "changes earlier turns"),
        ("{{ raise_exception('only one message') if messages|length > 1 }}", "only one message"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' * (messages|length) }}", "changes earlier turns"),
        ("{{ messages[0].content }}{% if messages|length > 2 %}1{{ messages|length }}{% endif %}", "earlier turns"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused_with_a_sentence(text, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        TurnTemplate(with_template(text))
    assert "\n" not in str(refused.value)


def test_the_variables_of_the_template_are_passed_on():
    tokenizer = with_template(
        CHAT_TEMPLATE.replace(
            "{{ message['role'] }}", "{{ message['role'] + (mood if message['role'] == 'user' else '') }}"
        )
    )
    between = TurnTemplate(tokenizer, {"mood": ", calm"}).between([user("x")], EOS_ID)
    assert "<|im_start|>user, calm\nx" in tokenizer.decode(between)
