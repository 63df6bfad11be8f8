import json

import pytest
from rich.console import Console

from dapo.data.check import check_dataset, print_report
from dapo.errors import DataError
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
    report = check_dataset(write(tmp_path / "d.jsonl", *rows, rows[0]), can_judge=lambda answer: answer != "7")
    assert report.is_good
    assert (report.rows, report.row_counts.distinct, report.row_counts.duplicates) == (31, 30, 1)
    assert report.lengths == tuple(range(1, 31))
    assert (report.judged, report.unreadable) == (30, 1)
    text = printed(report)
    assert "31 rows, 30 distinct, 1 duplicate left out" in text
    assert "layout: prompt and answer (31)" in text
    assert "prompt length in words, longest 30" in text
    assert "the judge can read 29 of 30 answers (96.7%)" in text
    assert "d.jsonl, line 8: '7'" in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert sum(int(line.split()[1]) for line in bars) == 30


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
