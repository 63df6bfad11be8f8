import json
import os

import pyarrow.parquet as pq
import pytest

from dapo.config import Config
from dapo.data.dataset import load_train_stream
from dapo.data.prepare import KNOWN, prepare
from dapo.data.readers import PREPARED, find_files
from dapo.errors import DataError
from tests.tiny import tiny_tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(tmp_path, name, rows):
    (file,) = prepare(name, write(tmp_path / "from.jsonl", rows), tmp_path / "data")
    assert file.path == tmp_path / "data" / f"{name}.parquet"
    return pq.read_table(file.path).to_pylist()


def test_published_rows_stay_messages_and_are_deduplicated(tmp_path):
    rows = [
        {
            "data_source": "aime",
            "prompt": [{"role": "user", "content": f"Problem {i}"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": i},
        }
        for i in list(range(30)) * 32
    ]
    found = prepared(tmp_path, "aime-2024", rows)
    assert found == [
        {"data_source": "aime", "prompt": [{"role": "user", "content": f"Problem {i}"}], "answer": str(i)}
        for i in range(30)
    ]


def test_the_gsm8k_answer_follows_the_hashes(tmp_path):
    rows = [
        {"question": "How many?", "answer": "5 * 2 = <<5*2=10>>10\n#### 10"},
        {"question": "How much?", "answer": "#### 1,234"},
        {"question": "Clean?", "answer": "72", "solution": "...\n#### 72"},
    ]
    found = prepared(tmp_path, "gsm8k", rows)
    assert [row["answer"] for row in found] == ["10", "1234", "72"]
    assert [row["prompt"] for row in found] == ["How many?", "How much?", "Clean?"]
    assert {row["data_source"] for row in found} == {"openai/gsm8k"}


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{1}$, no, $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}} is the set", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{7}", "7"),
    ],
)
def test_the_math_answer_is_in_the_last_box(tmp_path, solution, answer):
    (row,) = prepared(tmp_path, "math", [{"problem": "p", "solution": solution, "level": "Level 5"}])
    assert row == {"data_source": "DigitalLearningGmbH/MATH-lighteval", "prompt": "p", "answer": answer}


@pytest.mark.parametrize(
    ("name", "row", "sentence"),
    [
        ("math", {"problem": "p", "solution": "no box"}, r"line 1: the solution has no \\boxed\{\}"),
        (
            "math",
            {"problem": "p", "solution": r"\boxed{1"},
            r"line 1: the last \\boxed\{ of the solution is never closed",
        ),
        ("gsm8k", {"question": "q", "answer": "a\nb"}, r"line 1: the answer has several lines, but no '####'"),
        ("aime-2024", {"prompt": "q"}, r"line 1: column 'answer' is missing"),
    ],
)
def test_a_row_without_a_gold_answer_is_refused_and_nothing_written(tmp_path, name, row, sentence):
    with pytest.raises(DataError, match=sentence):
        prepared(tmp_path, name, [row])
    assert not (tmp_path / "data").exists()


def test_duplicates_and_conflicts_are_decided_by_the_extracted_answer(tmp_path):
    rows = [
        {"question": "a", "answer": "one way\n#### 1"},
        {"question": "a", "answer": "another way\n#### 1"},
        {"question": "b", "answer": "#### 1"},
        {"question": "b", "answer": "#### 2"},
    ]
    files = prepare("gsm8k", write(tmp_path / "from.jsonl", rows), tmp_path)
    assert [str(file) for file in files] == [
        f"{tmp_path}/gsm8k.parquet: 1 question (4 rows, 2 distinct, 1 duplicate left out, 1 question with conflicting "
        "answers left out (2 rows))"
    ]


def test_running_it_again_changes_nothing_and_leaves_no_other_file(tmp_path):
    rows = [{"prompt": "q", "answer": "1"}]
    prepared(tmp_path, "dapo-math-17k", rows)
    first = (tmp_path / "data" / "dapo-math-17k.parquet").read_bytes()
    prepared(tmp_path, "dapo-math-17k", rows)
    assert (tmp_path / "data" / "dapo-math-17k.parquet").read_bytes() == first
    assert os.listdir(tmp_path / "data") == ["dapo-math-17k.parquet"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    prepared(tmp_path, "aime-2024", [{"prompt": "q", "answer": "1"}])
    first = (tmp_path / "data" / "aime-2024.parquet").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"aime-2024\.parquet: cannot be written \(No space left on device\)"):
        prepared(tmp_path, "aime-2024", [{"prompt": "other", "answer": "1"}])
    assert (tmp_path / "data" / "aime-2024.parquet").read_bytes() == first
    assert os.listdir(tmp_path / "data") == ["aime-2024.parquet"]


def test_a_prepared_file_can_be_trained_on(tmp_path):
    prepared(tmp_path, "gsm8k", [{"question": "q", "answer": "#### 4"}])
    train = str(tmp_path / "data" / "gsm8k.parquet")
    config = Config.parse({"model": {"path": "m"}, "data": {"train": train}})
    (prompt,) = load_train_stream(config, tiny_tokenizer()).questions()
    assert (prompt.answer, prompt.is_text, prompt.data_source) == ("4", True, "openai/gsm8k")


def test_both_splits_come_from_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(path, name, *, split, revision):
        assert (path, name, revision) == ("openai/gsm8k", "main", None)
        return datasets.Dataset.from_list([{"question": f"a {split} question", "answer": "#### 1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    files = prepare("gsm8k", None, tmp_path)
    assert [file.path.name for file in files] == ["gsm8k.parquet", "gsm8k-test.parquet"]
    assert pq.read_table(files[1].path)["prompt"].to_pylist() == ["a test question"]


def test_without_a_network_nothing_is_written(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"openai/gsm8k \(main, train\): .*the hub cannot be reached"):
        prepare("gsm8k", None, tmp_path)
    assert not os.listdir(tmp_path)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path):
    with pytest.raises(
        DataError, match="gsm9k: not a dataset that can be prepared; choose one of dapo-math-17k, aime-2024"
    ):
        prepare("gsm9k", None, tmp_path)


def test_a_missing_file_that_prepare_would_write_names_the_command():
    assert set(KNOWN) == set(PREPARED)
    with pytest.raises(DataError, match=r"no such file.*`dapo data prepare gsm8k` writes it"):
        find_files("data/gsm8k-test.parquet")
    with pytest.raises(DataError, match="relative paths start at the working directory"):
        find_files("data/gsm9k.parquet")
