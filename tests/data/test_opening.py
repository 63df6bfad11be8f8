"""Rows begin as episodes: the environment's first messages, its tools in the template, and rows that it tells apart."""

from __future__ import annotations

from contextlib import closing, contextmanager

import pytest

from dapo.data.dataset import load_run_data
from dapo.environments.pool import build_environment
from dapo.errors import ConfigError, DataError
from tests.data.test_dataset import config, write
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

GREETING = """
from dapo import End

class Greeting:
    def __init__(self, row):
        self.row = row

    def start(self):
        if self.row["answer"] == "13":
            raise ValueError("not this one")
        return [{"role": "system", "content": "Greet."}, f"Say hello to {self.row['name']}."]

    def reply(self, text):
        return End(1.0)

def add(a: int, b: int) -> int:
    '''Add.'''
    return a + b
"""
TOOL_TEMPLATE = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHAT_TEMPLATE


@contextmanager
def loaded(options, use, tokenizer=None):
    section = options.environment.model_copy(update={"use": use, "workers": 1})
    pool = build_environment(options.model_copy(update={"environment": section}))
    assert pool is not None
    with closing(pool):
        yield load_run_data(options, tokenizer or tiny_tokenizer(), (), None, pool)


def file(tmp_path):
    (tmp_path / "greeting.py").write_text(GREETING)
    return f"{tmp_path}/greeting.py"


def test_an_episode_begins_with_the_messages_of_its_environment(tmp_path):
    rows = [{"prompt": "Greet", "answer": "1", "name": "Ann"}, {"prompt": "Greet", "answer": "1", "name": "Bo"}]
    with loaded(config(write(tmp_path / "d.jsonl", rows)), f"{file(tmp_path)}:Greeting") as data:
        ann, bo = data.stream.questions()
    assert tiny_tokenizer().decode(ann.tokens) == (
        "<|im_start|>system\nGreet.<|im_end|>\n<|im_start|>user\nSay hello to Ann.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [message["content"] for message in bo.messages] == ["Greet.", "Say hello to Bo."]
    assert ann.extra == {"name": "Ann", "row_prompt": [{"role": "user", "content": "Greet"}]}
    assert ann.uid != bo.uid


def test_a_row_that_cannot_begin_is_named(tmp_path):
    rows = [{"prompt": "a", "answer": "1", "name": "Ann"}, {"prompt": "b", "answer": "13", "name": "Bo"}]
    options = config(write(tmp_path / "d.jsonl", rows))
    expected = r"d\.jsonl, line 2: environment\.use: ValueError: not this one \(greeting\.py:\d+\)"
    with pytest.raises(DataError, match=expected), loaded(options, f"{file(tmp_path)}:Greeting"):
        pass


def test_one_question_may_have_several_hidden_answers_and_repeats_are_left_out(tmp_path):
    train = [{"prompt": "guess", "answer": answer} for answer in (1, 2, 3, 3, "3")]
    options = config(
        write(tmp_path / "d.jsonl", train), evaluate=write(tmp_path / "e.jsonl", [{"prompt": "guess", "answer": 2}])
    )
    with loaded(options, "guess") as data:
        assert [prompt.answer for prompt in data.stream.questions()] == [1, 3]  # 2 is held out
        assert len({prompt.uid for prompt in data.stream.questions()}) == 2
        assert "row_prompt" not in data.stream.questions()[0].extra


def test_tools_are_offered_by_the_template_or_the_model_is_refused(tmp_path):
    options = config(write(tmp_path / "d.jsonl", [{"prompt": "two?", "answer": 2}]))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    with loaded(options, f"tools:{file(tmp_path)}:add", tokenizer) as data:
        (prompt,) = data.stream.questions()
        assert tokenizer.decode(prompt.tokens).startswith("[add]<|im_start|>user\ntwo?")
    for template in (CHAT_TEMPLATE, None):
        tokenizer.chat_template = template
        refused = pytest.raises(ConfigError, match="chat template does not read them")
        with refused, loaded(options, f"tools:{file(tmp_path)}:add", tokenizer):
            pass
