import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config import Source
from dapo.data.prompt_format import TEMPLATES, PromptFormat
from dapo.data.readers import read_rows
from dapo.data.rows import layout_of, read_question
from dapo.errors import ConfigError, DataError

VERL = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: what is 1+1?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def read(row, prompt_format=PromptFormat()):  # noqa: B008
    return read_question("d.jsonl, line 7", row, prompt_format)


def through_parquet(tmp_path, rows):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    return [row for _, row in read_rows(Source(path=str(tmp_path / "d.parquet")))]


def test_a_verl_row_gives_its_ground_truth_and_keeps_its_other_columns(tmp_path):
    for row in (VERL, *through_parquet(tmp_path, [VERL])):
        question = read(row)
        assert question.messages == ({"role": "user", "content": "Solve: what is 1+1?"},)
        assert (question.answer, question.data_source, question.is_text) == ("2", "math_dapo", False)
        assert question.extra == {
            "ability": "MATH",
            "reward_model": VERL["reward_model"],
            "extra_info": {"index": "9a9b6eb4"},
        }
        assert layout_of(row) == "verl"


def test_trl_rows_come_as_text_or_messages_and_need_no_answer():
    text = read({"prompt": "The sky is", "topic": "sky"})
    assert (text.messages, text.answer, text.is_text) == (({"role": "user", "content": "The sky is"},), None, True)
    assert text.extra == {"topic": "sky"}
    chat = read({"prompt": [{"role": "user", "content": "What color is the sky?"}], "solution": "blue"})
    assert (chat.answer, chat.is_text, chat.extra) == ("blue", False, {})


@pytest.mark.parametrize("column", ["prompt", "question", "problem"])
def test_plain_rows_may_use_three_question_columns(column):
    question = read({column: "two?", "answer": 2, "level": 3})
    assert question.messages == ({"role": "user", "content": "two?"},)
    assert (question.answer, question.data_source, question.extra) == (2, "default", {"level": 3})


def test_answer_is_preferred_to_ground_truth_and_that_to_solution():
    row = {"prompt": "x", "answer": "a", "ground_truth": "g", "solution": "s"}
    assert read(row).answer == "a"
    assert read(row).extra == {"ground_truth": "g", "solution": "s"}
    assert read(row | {"answer": None}).answer == "g"
    assert read({"prompt": "x", "solution": "s"}).answer == "s"


def test_the_parts_of_a_message_are_joined_when_all_are_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None}]}
    assert (
        read(row).messages == read(*through_parquet(tmp_path, [row])).messages == ({"role": "user", "content": "ab"},)
    )


def test_extras_become_plain_json_values(tmp_path):
    row = {
        "prompt": "x",
        "answer": Decimal("3.50"),
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "day": datetime.date(2024, 1, 2),
        "took": datetime.timedelta(seconds=1.5),
        "raw": b"\x00\xff",
        "nothing": None,
        "nan": float("nan"),
        "deep": {"list": [1, {"x": 2.5}], "null": None},
    }
    plain = {
        "when": "2024-01-02T03:04:05",
        "day": "2024-01-02",
        "took": 1.5,
        "raw": "AP8=",
        "nothing": None,
        "nan": None,
        "deep": {"list": [1, {"x": 2.5}], "null": None},
    }
    row["deep"]["list"] = [{"x": 1.0}, {"x": 2.5}]  # arrow lists hold one type
    plain["deep"]["list"] = [{"x": 1.0}, {"x": 2.5}]
    for found in (row, *through_parquet(tmp_path, [row])):
        question = read(found)
        assert (question.answer, question.extra) == ("3.50", plain)
        assert json.loads(json.dumps(question.extra, allow_nan=False)) == plain


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": 1}, r"is missing \(and there is no 'question' or 'problem'; columns: answer\); data.columns maps"),
        ({"prompt": None, "answer": 1}, r"column 'prompt' is null"),
        ({}, r"column 'prompt' is missing"),
        (
            {"question": "x", "target": 1},
            r"column 'answer' is missing \(and there is no 'ground_truth' or 'solution'; columns: question, target\); "
            r"data.columns maps other names",
        ),
        ({"problem": "x", "answer": None}, r"column 'answer' is null"),
        ({"prompt": "x", "answer": " "}, r"column 'answer' is empty"),
        ({"prompt": "x", "answer": float("nan")}, r"column 'answer' is nan, expected an answer"),
        ({"prompt": "x", "answer": object()}, r"column 'answer' has a value of type object, which has no JSON form"),
        ({"prompt": " \n", "answer": 1}, r"column 'prompt' is empty"),
        ({"prompt": 5, "answer": 1}, r"'prompt' must be text or a list of \{role, content\} messages, found int"),
        ({"prompt": [], "answer": 1}, r"column 'prompt' must be text or a list of .*, found an empty list"),
        ({"prompt": ["x"], "answer": 1}, r"prompt\[0\] must be a \{role, content\} message, found str"),
        ({"prompt": [{"role": "user"}], "answer": 1}, r"column 'prompt\[0\]\.content' is missing"),
        ({"prompt": [{"role": None, "content": "x"}], "answer": 1}, r"column 'prompt\[0\]\.role' is null"),
        ({"prompt": [{"role": "user", "content": 3}], "answer": 1}, r"prompt\[0\]\.content must be text, found int"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            r"prompt\[0\]\.content has a part of type 'image', but only text is supported",
        ),
        ({"prompt": [{"role": "user", "content": [3]}]}, r"prompt\[0\]\.content has int, but only text"),
        (
            {"prompt": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            r"prompt\[0\] has 'tool_calls', but a message may have only role and content",
        ),
        ({"prompt": "<image>", "answer": 1, "images": [{}]}, r"column 'images' is not empty, but only text"),
        ({"prompt": "x", "answer": 1, "data_source": 3}, r"column 'data_source' must be text, found int"),
        (VERL | {"reward_model": "2"}, r"column 'reward_model' must be a mapping with 'ground_truth', found str"),
        (VERL | {"reward_model": {"style": "rule"}}, r"column 'reward_model\.ground_truth' is missing"),
        (VERL | {"reward_model": {"ground_truth": None}}, r"column 'reward_model\.ground_truth' is null"),
        (VERL | {"prompt": None}, r"column 'prompt' is null"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_and_column(row, sentence):
    with pytest.raises(DataError, match=r"^d\.jsonl, line 7: " + ".*" + sentence) as caught:
        read(row)
    assert "\n" not in str(caught.value)


def test_parquet_nulls_deep_in_a_row_are_refused_by_name(tmp_path):
    no_gold = VERL | {"reward_model": {"ground_truth": None, "style": "rule"}}
    no_text = VERL | {"prompt": [{"role": "user", "content": None}]}
    first, second, third = through_parquet(tmp_path, [VERL, no_gold, no_text])
    assert read(first).answer == "2"
    with pytest.raises(DataError, match=r"column 'reward_model\.ground_truth' is null"):
        read(second)
    with pytest.raises(DataError, match=r"column 'prompt\[0\]\.content' is null"):
        read(third)


def test_the_template_is_put_around_bare_questions_and_leaves_other_braces_alone():
    prompt_format = PromptFormat.of(r"Use \boxed{} and {x}: {question} {{}}", None)
    assert read({"prompt": "why {question}?"}, prompt_format).messages[0]["content"] == (
        r"Use \boxed{} and {x}: why {question}? {{}}"
    )
    assert read(VERL, prompt_format).messages == read(VERL).messages


def test_the_dapo_template_asks_for_a_last_line_with_the_answer():
    text = read({"question": "What is 1+1?", "answer": "2"}, PromptFormat.of("dapo", None)).messages[0]["content"]
    before, _, after = text.partition("What is 1+1?")
    assert "Answer: $Answer" in before and "Answer:" in after
    assert TEMPLATES["dapo"].count("{question}") == 1


def test_the_system_prompt_goes_in_front_unless_there_is_one():
    prompt_format = PromptFormat.of(None, "be brief")
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    assert [m["content"] for m in read({"prompt": "x"}, prompt_format).messages] == ["be brief", "x"]
    assert [m["content"] for m in read({"prompt": own}, prompt_format).messages] == ["own", "x"]


@pytest.mark.parametrize("template", ["dappo", "no place for it", "{Question}"])
def test_a_template_without_a_place_for_the_question_is_refused(template):
    with pytest.raises(
        ConfigError, match=r"data\.prompt_template is '.*': expected text that contains \{question\}, or"
    ):
        PromptFormat.of(template, None)
