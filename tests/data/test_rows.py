import json

import pytest

from dapo.data.rows import load_prompts
from dapo.errors import DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def load(path, content, **kwargs):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_prompts(path, TOKENIZER, kwargs.pop("max_prompt_length", 200), **kwargs)


def test_text_and_messages_become_the_same_prompt(tmp_path):
    rows = [
        {"prompt": "two?", "answer": 2, "level": 3},
        {"prompt": [{"role": "user", "content": "two?"}], "answer": 2, "data_source": "mine"},
    ]
    first, second = load(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert first.messages == second.messages == ({"role": "user", "content": "two?"},)
    assert first.uid == second.uid
    assert TOKENIZER.decode(first.tokens) == "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    assert first.extra == {"level": 3}
    assert (first.data_source, second.data_source) == ("default", "mine")


def test_prompts_with_different_answers_have_different_identities(tmp_path):
    rows = [{"prompt": "x", "answer": 1}, {"prompt": "x", "answer": 2}, {"prompt": "y", "answer": 1}]
    prompts = load(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    assert len({prompt.uid for prompt in prompts}) == 3


def test_the_system_prompt_goes_in_front_unless_there_is_one(tmp_path):
    rows = [
        {"prompt": "x", "answer": 1},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], "answer": 1},
    ]
    first, second = load(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)), system_prompt="be brief")
    assert [message["content"] for message in first.messages] == ["be brief", "x"]
    assert [message["content"] for message in second.messages] == ["own", "x"]


def test_a_model_without_chat_template_gets_the_plain_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "d.jsonl").write_text('{"prompt": "hello", "answer": 1}')
    (prompt,) = load_prompts(tmp_path / "d.jsonl", tokenizer, 100)
    assert tokenizer.decode(prompt.tokens) == "hello"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"d\.jsonl: no rows"),
        ("\n\n", r"d\.jsonl: no rows"),
        ('{"prompt": "x", "answer": 1}\n{"prompt": "x"', r"d\.jsonl, line 2: not valid JSON \(.*column"),
        ("[1, 2]", r"line 1: expected a JSON object, found list"),
        ('{"answer": 1}', r"line 1: column 'prompt' is missing"),
        ('\n{"prompt": "x"}', r"line 2: column 'answer' is missing"),
        ('{"prompt": 5, "answer": 1}', r"column 'prompt' must be text or a list of \{role, content\} messages"),
        ('{"prompt": [], "answer": 1}', r"column 'prompt' must be text"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', r"column 'prompt' must be text"),
        ('{"prompt": "x", "answer": 1, "data_source": 3}', r"column 'data_source' must be text, found int"),
        (b'{"prompt": "\xff", "answer": 1}', r"d\.jsonl: not UTF-8 text \(byte 12\)"),
        (
            '{"prompt": "%s", "answer": 1}' % ("x" * 300),
            r"line 1: the prompt has 3\d\d tokens, more than data\.max_prompt_length = 200",
        ),
    ],
)
def test_a_bad_file_or_row_gets_one_sentence(tmp_path, content, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        load(tmp_path / "d.jsonl", content)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read \(No such file"):
        load_prompts(tmp_path / "gone.jsonl", TOKENIZER, 100)
