import json
import re

import pytest
from rich.console import Console

from dapo.config import RewardConfig
from dapo.data.check import check_dataset, print_report
from dapo.errors import DataError, RewardError
from dapo.evaluation.gold import gold_judge
from tests.tiny import tiny_tokenizer


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def printed(report):
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(console, report)
    return console.export_text()


def test_a_good_dataset_is_counted_and_its_lengths_drawn(tmp_path):
    rows = [{"prompt": "word " * (i + 1), "answer": str(i)} for i in range(30)]
    rows[29]["answer"] = "five"
    report = check_dataset(write(tmp_path / "d.jsonl", *rows, rows[0]), gold_judge(RewardConfig(use="integer")))
    assert report.is_good
    assert (report.rows, report.row_counts.distinct, report.row_counts.duplicates) == (31, 30, 1)
    assert report.lengths == tuple(range(1, 31))
    text = printed(report)
    assert "31 rows, 30 distinct, 1 duplicate left out" in text
    assert "layout: prompt and answer (31)" in text
    assert "prompt length in words, longest 30" in text
    assert "the rule integer can read 29 of 30 answers (96.7%)" in text
    assert "d.jsonl, line 30: 'five'" in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert sum(int(line.split()[1]) for line in bars) == 30


def test_the_histogram_has_no_empty_bins(tmp_path):
    rows = [{"prompt": "word " * length, "answer": "1"} for length in (1, 2, 1000)]
    text = printed(check_dataset(write(tmp_path / "d.jsonl", *rows)))
    lines = [line.split() for line in text.splitlines() if "█" in line]
    assert [line[:2] for line in lines] == [["0-83", "2"], ["924-1,007", "1"]]
    assert not re.search(r"-\d+ +0\b", text)


def test_any_judge_scores_the_gold_answers_as_responses_and_those_it_cannot_judge_are_listed(tmp_path):
    code = "def reward(completion, answer, level):\n    return int(completion) if level else {'score': 1, 'acc': True}"
    (tmp_path / "reward.py").write_text(code)
    rows = [{"prompt": "a", "answer": "5", "level": 1}, {"prompt": "b", "answer": "x", "level": 1}]
    rows += [{"prompt": "c", "answer": "x", "level": 0}]
    path = write(tmp_path / "d.jsonl", *rows)
    for use in (f"{tmp_path}/reward.py:reward", {f"{tmp_path}/reward.py:reward": 1.0}):
        text = printed(check_dataset(path, gold_judge(RewardConfig(use=use, workers=1))))
        assert "as responses, the judge gives: 3 responses, mean score 3, 1 correct, 1 unjudged" in text
        assert "d.jsonl, line 2: " in text and "ValueError: invalid literal for int()" in text
    (tmp_path / "reward.py").write_text(code.replace("level", "depth"))
    with pytest.raises(RewardError, match="'depth'"):
        check_dataset(path, gold_judge(RewardConfig(use=f"{tmp_path}/reward.py:reward", workers=1)))


def test_reasons_why_gold_answers_are_unjudged_are_grouped_and_counted(tmp_path):
    code = "def reward(completion, answer):\n    assert answer == 12, 'odd' if answer else 'none'\n    return 1"
    (tmp_path / "reward.py").write_text(code)
    options = RewardConfig(use=f"{tmp_path}/reward.py:reward", workers=1)
    path = write(tmp_path / "d.jsonl", *({"prompt": f"{i}", "answer": i} for i in range(13)))
    report = check_dataset(path, gold_judge(options))
    text = printed(report)
    assert report.is_good
    assert text.index(f"11 x AssertionError: odd (reward.py:2) (first: {path}, line 2)") < text.index(
        f"{path}, line 1: AssertionError: none (reward.py:2)"
    )
    assert text.count("AssertionError") == 2
    path = write(tmp_path / "d.jsonl", *({"prompt": f"{i}", "answer": i} for i in range(1, 4)))
    report = check_dataset(path, gold_judge(options))
    assert not report.is_good
    assert "3 responses, 3 unjudged" in printed(report)


def test_gold_answers_of_which_a_rule_can_read_none_are_not_good(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"})
    assert not check_dataset(path, gold_judge(RewardConfig(use="integer"))).is_good


@pytest.mark.parametrize(
    ("returns", "is_warned"),
    [
        ("0.0", True),
        ("-1.0", True),
        ("{'score': 1.0, 'acc': False}", True),
        ("float(answer == 1)", False),
        ("{'score': 0.0, 'acc': answer == 1}", False),
    ],
)
def test_a_reward_that_calls_all_gold_answers_wrong_is_warned_about(tmp_path, returns, is_warned):
    (tmp_path / "reward.py").write_text(f"def reward(completion, answer):\n    return {returns}")
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    report = check_dataset(path, gold_judge(RewardConfig(use=f"{tmp_path}/reward.py:reward", workers=1)))
    assert report.is_good
    assert ("warning: no gold answer is right: the reward may not accept" in printed(report)) is is_warned


def test_rows_without_gold_answers_are_not_good_if_the_judge_needs_them(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "answr": 1}, {"prompt": "b", "answr": 2})
    (tmp_path / "reward.py").write_text("def reward(completion, answer): ...\ndef length(completion): ...")
    for use in ("math", "auto", f"{tmp_path}/reward.py:reward", {f"{tmp_path}/reward.py:reward": 1.0}):
        report = check_dataset(path, gold_judge(RewardConfig(use=use, workers=1)))
        assert not report.is_good
        text = " ".join(printed(report).split())
        assert "but no row has one (columns: answr, prompt); did you mean 'answr'?" in text
    for use in (f"{tmp_path}/reward.py:length", "http://127.0.0.1:9"):
        assert check_dataset(path, gold_judge(RewardConfig(use=use, workers=1))).is_good


def test_renamed_columns_are_checked(tmp_path):
    path = write(tmp_path / "d.jsonl", {"q": "a", "final": "5"}, {"q": "b"})
    report = check_dataset(path, columns={"prompt": "q", "answer": "final"})
    assert (report.rows, report.bad_rows) == (2, 1)
    assert "line 2: there is no column 'final'" in printed(report)


def test_bad_rows_are_all_counted_and_the_first_ten_shown(tmp_path):
    good = {"question": "x [bold]", "answer": "1"}
    report = check_dataset(write(tmp_path / "d.jsonl", good, "oops", *({"question": "y"} for _ in range(14)), good))
    assert not report.is_good
    assert (report.rows, report.bad_rows, len(report.first_bad)) == (17, 15, 10)
    text = printed(report)
    assert "15 rows cannot be used:" in text
    assert "d.jsonl, line 2: not valid JSON" in text
    assert "d.jsonl, line 3: column 'answer' is missing" in text
    assert "and 5 more" in text


def test_with_a_tokenizer_lengths_are_tokens_of_the_whole_prompt(tmp_path):
    report = check_dataset(
        write(tmp_path / "d.jsonl", {"prompt": "abc", "answer": 1}), template="<{question}>", tokenizer=tiny_tokenizer()
    )
    assert report.length_unit == "tokens"
    assert report.lengths == (len("?user\n<abc>?\n?assistant\n"),)


def test_every_layout_is_named(tmp_path):
    verl = {"prompt": [{"role": "user", "content": "v"}], "reward_model": {"ground_truth": "1"}}
    rows = [verl, {"prompt": "a"}, {"prompt": "b", "answer": 1}, {"problem": "c", "answer": 1}]
    report = check_dataset(write(tmp_path / "d.jsonl", *rows))
    assert report.layouts == {"verl": 1, "prompt only": 1, "prompt and answer": 1, "question and answer": 1}
    assert report.without_answer == 1
    assert "1 question without an answer" in printed(report)


def test_an_empty_file_is_not_good(tmp_path):
    report = check_dataset(write(tmp_path / "d.jsonl"))
    assert not report.is_good
    assert "no rows" in printed(report)


def test_a_gym_task_has_no_file_to_check():
    with pytest.raises(DataError, match="gym:chain_sum: reasoning-gym generates its questions as they are drawn"):
        check_dataset("gym:chain_sum")
