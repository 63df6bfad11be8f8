import json

import pytest
from typer.testing import CliRunner

import dapo
from dapo.cli import app
from dapo.config import RewardConfig
from dapo.errors import DapoError, RewardError
from dapo.evaluation.judging import Judgment, describe
from tests.rewards.test_endpoint import server

REWARD = """
def reward(completion, answer, level):
    return {"score": level * (completion == answer), "acc": 0.5, "format": 0.25, "note": "a\\nb"}

def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path / "mine.py"


def run(*arguments):
    return CliRunner().invoke(app, ["judge", *map(str, arguments)])


def test_a_rule_judges_one_response():
    right = dapo.judge("math", completion="So the Answer: 34", answer="34")
    assert (right.score, right.acc, right.extracted, right.error, right.components) == (1.0, True, "34", None, {})
    wrong = dapo.judge(RewardConfig(use="integer", extract=("boxed",)), "Answer: 34", 34)
    assert (wrong.score, wrong.acc, wrong.extracted, wrong.verdict) == (0.0, False, None, "wrong")
    unjudged = dapo.judge("integer", "34", "thirty-four")
    assert (unjudged.score, unjudged.verdict) == (None, "unjudged")
    assert "integer expects a whole number" in unjudged.error


def test_a_weighted_sum_shows_what_each_component_gave(file):
    found = dapo.judge({"exact": 1.0, f"{file}:reward": 0.5}, "34", "34", level=3)
    assert (found.score, found.acc) == (2.5, True)
    assert found.components == {"exact": 1.0, "reward": 3.0, "format": 0.25}
    assert found.extras["note"] == "a\nb"


def test_function_objects_judge_alone_or_together():
    def length(completion):
        return len(completion)

    def tokens(completion_ids, prompts):
        return [len(ids) + len(prompts[0]) for ids in completion_ids]

    assert dapo.judge(length, "four").score == 4.0
    together = dapo.judge([length, tokens], "four", completion_ids=[1, 2], prompt="how?")
    assert (together.score, together.components) == (4.0 + 2 + 4, {"length": 4.0, "tokens": 6.0})
    assert dapo.judge({length: 0.5, len_of_kwargs: -1.0}, "four").score == 2.0 - 1.0


def len_of_kwargs(**kwargs):
    return [float(len(kwargs["completions"]))]


def test_an_endpoint_is_asked(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with server(lambda *_: (200, {"scores": [{"score": 0.25, "acc": 0.5}]})) as (url, asked):
        found = dapo.judge(url, "a", "b", prompt="why?", level=1)
    assert (found.score, found.acc, found.verdict) == (0.25, 0.5, "50% correct")
    [sample] = asked[0]["samples"]
    assert (sample["prompt"], sample["extra"]) == ([{"role": "user", "content": "why?"}], {"level": 1})


@pytest.mark.parametrize(
    ("use", "row", "sentence"),
    [
        ("maths", {}, "which is not a judge; did you mean 'math'?"),
        ("{file}:reward", {}, "takes 'level', which is not a column of the data (columns: answer, prompt)"),
        ("{file}:tokens", {}, "takes 'completion_ids'; give them, or name the --model"),
        ("model:gone", {}, "a reward model reads the question, too"),
        ("https://user:pass@host/", {}, "reward.use"),
        ("math", {"prompt": [{"role": "user"}]}, "column 'prompt[0].content' is missing"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(file, use, row, sentence):
    with pytest.raises(DapoError) as caught:
        dapo.judge(use.format(file=file), "a", "b", **row)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RewardError, match="the list of reward functions is empty"):
        dapo.judge([], "a")


def test_the_command_prints_what_the_judge_made_of_a_response():
    assert run("--use", "math", "--answer", "34", "Answer: 34").stdout.splitlines() == [
        "score:      1", "verdict:    correct", 'extracted:  "34"'
    ]  # fmt: skip
    assert run("--use", "math", "--answer", "34", "Answer: 35").stdout.splitlines() == [
        "score:      0", "verdict:    wrong", 'extracted:  "35"', 'reason:     the gold answer is "34"'
    ]  # fmt: skip
    shown = run("--use", "{integer: 1, regex: 0.5}", "--answer", "34", "so 34", "reward.regex=so").stdout
    assert "components: integer 1, regex 1" in shown


def test_options_may_come_before_the_response():
    first, last = (["reward.regex=(\\d+)", "7"], ["7", "reward.regex=(\\d+)"])
    assert "correct" in run("--use", "regex", "--answer", "7", *first).stdout
    assert run("--use", "regex", "--answer", "7", *first).stdout == run("--use", "regex", "--answer", "7", *last).stdout
    missing = run("--use", "regex", "--answer", "7", "reward.regex=(\\d+)")
    assert "there is no response, only options (reward.regex=(\\d+)); give the response first" in str(missing.exception)


def test_what_a_judge_needs_is_named_as_the_command_takes_it(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"completion": "5"}')
    for response in ("3", tmp_path / "r.jsonl"):
        missing = run("--use", "math", response)
        assert "reward.use: math needs the gold answer; give --answer" in str(missing.exception)
    assert "give --prompt" in str(run("--use", "model:gone", "3").exception)


def test_an_empty_detail_of_a_right_program_is_not_shown():
    right = Judgment(1.0, True, None, None, {}, {"passed": 2, "reason": None, "detail": ""})
    assert describe(right, None) == {"score": "1", "verdict": "correct", "passed": "2"}


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("7", "int", "7 (int)"),
        ("0.5", "float", "0.5 (float)"),
        ("true", "bool", "true (bool)"),
        ("[1,2]", "list", "[1, 2] (list)"),
        ('"7"', "str", '"7" (str)'),
        ("seven", "str", None),
        ("NaN", "str", None),
        ("null", "str", None),
        ("9" * 5000, "str", None),
    ],
)
def test_a_function_gets_the_answer_of_the_command_as_a_file_of_json_would_hold_it(tmp_path, text, kind, line):
    (tmp_path / "kind.py").write_text(f"def reward(completion, answer):\n    return type(answer).__name__ == {kind!r}")
    for use in (f"{tmp_path}/kind.py:reward", f"{{{tmp_path}/kind.py:reward: 1.0}}"):
        shown = run("--use", use, "--answer", text, "x").stdout.splitlines()
        assert "score:      1" in shown
        assert [each for each in shown if each.startswith("answer:")] == ([f"answer:     {line}"] if line else [])


def test_a_rule_gets_the_answer_of_the_command_as_text():
    assert "score:      1" in run("--use", "exact", "--answer", "0.50", "0.50").stdout
    assert "answer:" not in run("--answer", "7", "7").stdout


def test_the_command_judges_a_file_of_responses_and_counts_verdicts(file, tmp_path):
    rows = [{"completion": "5", "answer": "5", "level": 2, "question": "2+3?"}, {"completion": "6", "level": 1}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("--use", f"{file}:reward", "--answer", "7", tmp_path / "r.jsonl")
    assert done.exit_code == 0
    given, first, second, last = done.stdout.splitlines()
    assert given == "answer:     7 (int)"
    assert first.endswith('line 1: score 2, verdict 50% correct, components format 0.25, note "a\\nb"')
    assert second.endswith('line 2: score 0, verdict 50% correct, components format 0.25, note "a\\nb"')
    assert last == "2 responses, mean score 1"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"answer": 5}', "column 'completion' is missing (columns: answer)"),
        ('{"completion": "5", "completion_ids": "5"}', "column 'completion_ids' must be a list of token ids"),
        ("", "no rows"),
        (None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "r.jsonl").write_text(content)
    done = run(tmp_path / "r.jsonl")
    assert isinstance(done.exception, DapoError)
    assert sentence in str(done.exception)


def test_a_response_may_be_a_negative_number_or_end_with_a_file_name():
    assert "correct" in run("--use", "integer", "--answer", "-5", "-5").output
    assert '"see notes.json"' in run("--use", "exact", "--answer", "3", "see notes.json").output
    missing = run("--use", "exact", "--answer", "3", "notes.jsonl")
    assert "no such file" in str(missing.exception)
