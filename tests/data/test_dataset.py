import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config import Config
from dapo.data.dataset import load_eval_sets, load_run_data, load_train_stream
from dapo.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def config(train, *, evaluate=None, seed=0, **data):
    data = {"train": train, "max_prompt_length": 200} | data
    return Config.parse({"model": {"path": "m"}, "run": {"seed": seed}, "data": data, "eval": {"data": evaluate}})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(*texts, answer="1"):
    return [{"prompt": text, "answer": answer} for text in texts]


def texts(prompts):
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_text_and_messages_become_the_same_tokens_and_the_same_identity(tmp_path):
    text = {"prompt": "two?", "answer": 2, "level": 3}
    chat = {"prompt": [{"role": "user", "content": "two?"}], "answer": 2, "data_source": "mine"}
    (first,) = load_train_stream(config(write(tmp_path / "a.jsonl", [text])), TOKENIZER).questions()
    (second,) = load_train_stream(config(write(tmp_path / "b.jsonl", [chat])), TOKENIZER).questions()
    assert TOKENIZER.decode(first.tokens) == "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    assert (first.uid, first.tokens, first.messages) == (second.uid, second.tokens, second.messages)
    assert (first.is_text, second.is_text) == (True, False)
    assert (first.extra, first.data_source, second.data_source) == ({"level": 3}, "default", "mine")


def test_a_batch_of_prompts_is_tokenized_as_each_would_be_alone(tmp_path):
    rows = questions(*("x" * (i % 90) + str(i) for i in range(1100)))
    found = load_train_stream(config(write(tmp_path / "d.jsonl", rows)), TOKENIZER).questions()
    assert texts(found) == [row["prompt"] for row in rows]
    for prompt in found[::97]:
        alone = TOKENIZER.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=True)
        assert list(prompt.tokens) == alone["input_ids"]


def test_a_model_without_chat_template_gets_the_plain_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    path = write(tmp_path / "d.jsonl", questions("hello"))
    (prompt,) = load_train_stream(config(path, system_prompt="be brief"), tokenizer).questions()
    assert tokenizer.decode(prompt.tokens) == "be brief\n\nhello"


def test_template_and_system_prompt_reach_the_prompt(tmp_path):
    path = write(tmp_path / "d.jsonl", questions("hello"))
    options = {"prompt_template": "<{question}>", "system_prompt": "be brief"}
    (prompt,) = load_train_stream(config(path, **options), TOKENIZER).questions()
    assert [message["content"] for message in prompt.messages] == ["be brief", "<hello>"]
    with pytest.raises(ConfigError, match=r"data\.prompt_template is 'dappo'"):
        load_train_stream(config(path, prompt_template="dappo"), TOKENIZER)


def test_a_row_that_the_chat_template_rejects_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no\n bad') }}{% endif %}x"
    path = write(tmp_path / "d.jsonl", questions("good", "fine", "bad"))
    with pytest.raises(DataError, match=r"line 3: the model's chat template or tokenizer rejects .*\(no bad\)"):
        load_train_stream(config(path), tokenizer)


def test_duplicates_conflicts_and_overlong_prompts_are_left_out_and_counted(tmp_path):
    rows = [
        *questions("a", "b ", "long " * 50, " b", "a"),
        *questions("c", answer="1"),
        *questions("c", answer=" 2"),
        {"prompt": "d"},
    ]
    stream = load_train_stream(config(write(tmp_path / "d.jsonl", rows)), TOKENIZER)
    assert texts(stream.questions()) == ["a", "b ", "d"]
    assert stream.notes == (
        f"{tmp_path}/d.jsonl: 8 rows, 5 distinct, 2 duplicates left out, 1 question with conflicting answers left out "
        "(2 rows), 1 prompt over 200 tokens left out, 1 without an answer",
    )


def test_a_prompt_that_is_too_long_can_stop_the_run(tmp_path):
    path = write(tmp_path / "d.jsonl", questions("a", "x" * 300))
    with pytest.raises(
        DataError, match=r"line 2: the prompt has 3\d\d tokens, more than data\.max_prompt_length = 200"
    ):
        load_train_stream(config(path, overlong_prompts="raise"), TOKENIZER)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], r"d\.jsonl: no rows; expected one question with its answer per row"),
        (questions("x" * 300), r"d\.jsonl: 1 row, 1 distinct, 1 prompt over 200 tokens left out; no question is left"),
        (questions("a") + questions("a", answer="2"), r"1 question with conflicting .*\(2 rows\); no question is left"),
        ([{"answer": 1}], r"d\.jsonl, line 1: column 'prompt' is missing"),
    ],
)
def test_a_dataset_without_a_usable_question_says_why(tmp_path, rows, sentence):
    with pytest.raises(DataError, match=sentence):
        load_train_stream(config(write(tmp_path / "d.jsonl", rows)), TOKENIZER)


def test_a_bad_line_stops_loading_with_its_error(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x", "answer": 1}\noops')
    with pytest.raises(DataError, match=r"d\.jsonl, line 2: not valid JSON"):
        load_train_stream(config(str(tmp_path / "d.jsonl")), TOKENIZER)


def test_sources_are_mixed_by_weight_and_deduplicated_together(tmp_path):
    first = write(tmp_path / "a.jsonl", questions("a1", "a2", "both", "conflict"))
    pq.write_table(
        pa.Table.from_pylist(questions("b1", "both") + questions("conflict", answer="2")), tmp_path / "b.parquet"
    )
    stream = load_train_stream(config([first, {"path": str(tmp_path / "b.parquet"), "weight": 3.0}]), TOKENIZER)
    assert texts(stream.questions()) == ["a1", "a2", "both", "b1"]
    drawn = texts(stream.take(400))
    assert drawn.count("b1") == 300 == stream.positions[1]
    assert "1 duplicate left out, 1 question with conflicting answers left out (1 row)" in stream.notes[1]


def test_questions_held_out_for_evaluation_are_never_drawn(tmp_path):
    path = write(tmp_path / "d.jsonl", questions("a", "b", "c", "d"))
    held = write(tmp_path / "e.jsonl", questions(" b\n", "c", "other", answer="9"))
    settings = config(path, evaluate=held, prompt_template="Q: {question}")
    sets = load_eval_sets(settings, TOKENIZER)
    assert {name: texts(prompts) for name, prompts in sets.items()} == {"e": ["Q:  b\n", "Q: c", "Q: other"]}
    stream = load_train_stream(settings, TOKENIZER, sets["e"])
    assert set(texts(stream.take(40))) == {"Q: a", "Q: d"}
    assert stream.notes == (f"{path}: 4 rows, 4 distinct, 2 questions held out for evaluation left out",)


def test_evaluation_sets_keep_their_names_and_order_and_report_what_was_left_out(tmp_path):
    one = write(tmp_path / "one.jsonl", questions("a", "b", "a"))
    two = write(tmp_path / "two.jsonl", questions("b", "c"))
    notes = []
    sets = load_eval_sets(config(one, evaluate={"x": [one, two], "y": two}), TOKENIZER, notes)
    assert {name: texts(prompts) for name, prompts in sets.items()} == {"x": ["a", "b", "c"], "y": ["b", "c"]}
    assert notes[0] == f"evaluation set x: {one}: 3 rows, 2 distinct, 1 duplicate left out"
    assert len(notes) == 3
    assert load_eval_sets(config(one), TOKENIZER) == {}


def test_size_takes_the_first_rows_and_changes_the_digest(tmp_path):
    path = write(tmp_path / "d.jsonl", questions("a", "b", "c"))
    whole, part = (load_train_stream(config({"path": path, **size}), TOKENIZER) for size in ({}, {"size": 2}))
    assert texts(part.questions()) == ["a", "b"]
    assert whole.digest != part.digest
    assert whole.digest == load_train_stream(config(path, seed=5), TOKENIZER).digest


def test_a_prompt_of_far_too_many_characters_is_never_tokenized(tmp_path):
    path = write(tmp_path / "d.jsonl", [*questions("short"), *questions("x" * (257 * 200))])

    class Tokenizer:
        chat_template, decode = TOKENIZER.chat_template, TOKENIZER.decode

        def apply_chat_template(self, conversations, **options):
            assert max(len(messages[0]["content"]) for messages in conversations) < 10
            return TOKENIZER.apply_chat_template(conversations, **options)

    stream = load_train_stream(config(path), Tokenizer())
    assert texts(stream.questions()) == ["short"]
    assert "1 prompt over 200 tokens left out" in stream.notes[0]
    with pytest.raises(
        DataError, match=r"line 2: the prompt has 51,400 characters, more than fit into .* = 200 tokens"
    ):
        load_train_stream(config(path, overlong_prompts="raise"), Tokenizer())


def test_a_chat_template_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo.model.template.TEMPLATE_SECONDS", 0.2)
    tokenizer = tiny_tokenizer()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = loop + tokenizer.chat_template
    path = write(tmp_path / "d.jsonl", questions("hello"))
    with pytest.raises(DataError, match=r"line 1: .*\(the chat template was still running after 0.2 s\)"):
        load_train_stream(config(path), tokenizer)
    tokenizer.chat_template = "{% for i in range(10**9) %}{% endfor %}"
    with pytest.raises(DataError, match=r"line 1: the model's chat template or tokenizer rejects .*Range too big"):
        load_train_stream(config(path), tokenizer)


VARIANTS = [
    {"prompt": "a", "answer": 1, "level": 1, "id": 1},
    {"prompt": "a", "answer": 1, "level": 1, "id": 2},
    {"prompt": "a", "answer": 1, "level": 2, "id": 3},
    {"prompt": "b", "answer": 1, "level": 1, "id": 4},
    {"prompt": "b", "answer": 2, "level": 1, "id": 5},
    {"prompt": "a", "answer": 1, "level": 1, "id": 1},
]


@pytest.mark.parametrize(
    ("seen", "options", "ids"),
    [
        ((), {}, [1]),
        ({"level"}, {}, [1, 3]),
        (None, {}, [1, 2, 3]),
        ((), {"deduplicate": False}, [1, 2, 3, 4, 5, 1]),
        (None, {"deduplicate": False}, [1, 2, 3, 4, 5, 1]),
    ],
)
def test_rows_are_duplicates_if_everything_the_judge_sees_is_equal(tmp_path, seen, options, ids):
    stream = load_train_stream(config(write(tmp_path / "d.jsonl", VARIANTS), **options), TOKENIZER, (), seen)
    prompts = stream.questions()
    assert [prompt.extra["id"] for prompt in prompts] == ids
    assert stream.columns() == {"level", "id"}
    assert ("kept" in stream.notes[0]) == (not options.get("deduplicate", True))
    # The same question and answer have the same uid in any set of rows, unless the judge can tell them apart.
    (plain, *_) = load_train_stream(config(write(tmp_path / "p.jsonl", VARIANTS[:1])), TOKENIZER).questions()
    assert prompts[0].uid == plain.uid
    told_apart = 1 if seen == () else len({prompt.extra["id"] for prompt in prompts if prompt.answer == 1} - {4})
    assert len({prompt.uid for prompt in prompts if prompt.messages[-1]["content"] == "a"}) == told_apart


THINKING = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if tools is defined and tools %}{{ raise_exception('no tools') }}{% endif %}assistant:"
    "{% set start = '<think>\n' %}{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %} <think></think>{% else %} {{ start }}{% endif %}"
    "{% endif %}"
)


def thinking_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


def first_prompt(tmp_path, tokenizer, tags=("<think>", "</think>"), text="two?", **data):
    options = config(write(tmp_path / "d.jsonl", questions(text)), **data)
    options = options.model_copy(update={"reward": options.reward.model_copy(update={"think_tags": tags})})
    return load_train_stream(options, tokenizer).questions()[0]


def test_the_chat_template_gets_the_variables_of_the_configuration(tmp_path):
    tokenizer = thinking_tokenizer()
    plain = first_prompt(tmp_path, tokenizer)
    off = first_prompt(tmp_path, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(plain.tokens) == "user: two?\nassistant: <think>\n"
    assert tokenizer.decode(off.tokens) == "user: two?\nassistant: <think></think>"
    assert (plain.opens_thought, off.opens_thought) == (True, False)


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "tokenize", "start"])
def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        first_prompt(tmp_path, thinking_tokenizer(), chat_template_kwargs={name: True})
    assert str(caught.value) == (
        f"data.chat_template_kwargs: the model's chat template does not read '{name}'; it reads enable_thinking, tools"
    )


def test_variables_without_a_template_that_could_read_them_are_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match="does not read 'enable_thinking'; it reads none but the messages"):
        first_prompt(tmp_path, tokenizer, chat_template_kwargs={"enable_thinking": False})
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the model has no chat template"):
        first_prompt(tmp_path, tokenizer, chat_template_kwargs={"enable_thinking": False})
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(ConfigError, match="the model's chat template cannot be read"):
        first_prompt(tmp_path, tokenizer, chat_template_kwargs={"enable_thinking": False})


def test_a_prompt_that_ends_with_the_opening_tag_opens_a_thought(tmp_path):
    plain = tiny_tokenizer()
    assert not first_prompt(tmp_path, plain, text="open with <think>").opens_thought  # the template goes on after it
    plain.chat_template = None
    assert first_prompt(tmp_path, plain, text="Solve it. <think> ").opens_thought
    assert not first_prompt(tmp_path, plain, text="Solve it. <think> ", tags=None).opens_thought
    assert not first_prompt(tmp_path, plain, text="Write <think>, then </think>").opens_thought
    assert first_prompt(tmp_path, plain, text="Solve it. [THINK]", tags=("[THINK]", "[/THINK]")).opens_thought
    assert not first_prompt(tmp_path, plain, text="Solve it. <think>", tags=("[THINK]", "[/THINK]")).opens_thought


def test_columns_are_renamed_in_training_and_evaluation_data_except_where_a_source_has_its_own(tmp_path):
    (tmp_path / "train.csv").write_text("Frage,final,level\none?,1,a\ntwo?,2,b\n")
    (tmp_path / "eval.json").write_text('[{"prompt": "three?", "answer": 3}, {"prompt": "two?", "answer": 2}]')
    values = {
        "model": {"path": "m"},
        "data": {"train": f"{tmp_path}/train.csv", "columns": {"prompt": "Frage", "answer": "final"}},
        "eval": {"data": {"path": f"{tmp_path}/eval.json", "columns": {}}, "k": 1},
    }
    data = load_run_data(Config.parse(values), tiny_tokenizer())
    (prompt,) = data.stream.questions()  # the other one is held out
    assert (prompt.messages[-1]["content"], prompt.answer, prompt.extra) == ("one?", "1", {"level": "a"})
    assert [prompt.answer for prompt in data.eval_sets["eval"]] == [3, 2]
    values["eval"]["data"].pop("columns")
    with pytest.raises(DataError, match=r"eval\.json, row 1: there is no column 'Frage'.*; columns: prompt, answer$"):
        load_run_data(Config.parse(values), tiny_tokenizer())
