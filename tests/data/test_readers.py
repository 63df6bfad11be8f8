import json
import re
import sys

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from dapo.config import Source
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import read_rows
from dapo.data.rows import read_question
from dapo.errors import DataError


def rows(path, **options):
    return list(read_rows(Source(path=str(path), **options)))


def test_a_jsonl_row_comes_with_its_line(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": "\xc3\xa9\xe2\x80\xa8"}\r\n')
    assert rows(tmp_path / "d.jsonl") == [
        (f"{tmp_path}/d.jsonl, line 1", {"a": 1}),
        (f"{tmp_path}/d.jsonl, line 3", {"a": "é\u2028"}),
    ]


def test_parquet_rows_are_numbered_across_batches_and_keep_their_nesting(tmp_path):
    table = pa.table({"n": list(range(3000)), "deep": [{"x": [i, None]} for i in range(3000)]})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=700)
    found = rows(tmp_path / "d.parquet")
    assert [where for where, _ in found] == [f"{tmp_path}/d.parquet, row {i}" for i in range(1, 3001)]
    assert [row for _, row in found] == [{"n": i, "deep": {"x": [i, None]}} for i in range(3000)]


def test_a_glob_reads_its_files_in_the_order_of_their_names_and_size_counts_rows(tmp_path):
    for name in ("b.jsonl", "a.json"):
        (tmp_path / name).write_text(f'{{"file": "{name}", "row": 1}}\n{{"file": "{name}", "row": 2}}\n')
    pq.write_table(pa.table({"file": ["c"], "row": [1]}), tmp_path / "c.parquet")
    assert [row["file"] for _, row in rows(tmp_path / "*")] == ["a.json", "a.json", "b.jsonl", "b.jsonl", "c"]
    assert [row["row"] for _, row in rows(tmp_path / "*", size=3)] == [1, 2, 1]


def test_a_file_whose_name_has_glob_characters_is_that_file(tmp_path):
    (tmp_path / "d[1].jsonl").write_text('{"a": 1}')
    assert [row for _, row in rows(tmp_path / "d[1].jsonl")] == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"a": 1', r"line 2: not valid JSON \(.* at column 8\); expected one object per line"),
        (b"[1, 2]", r"line 2: expected a JSON object, found list"),
        (b'{"a": "\xff"}', r"line 2: not UTF-8 text \(byte 8 of the line\)"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"line 2: cannot be parsed as JSON"),
        (b"[" * 100_000, r"line 2: cannot be parsed as JSON"),
    ],
)
def test_a_bad_line_is_yielded_as_its_error_and_reading_continues(tmp_path, line, sentence):
    (tmp_path / "d.jsonl").write_bytes(b'{"a": 0}\n' + line + b'\n{"a": 2}\n')
    (_, first), (_, error), (_, last) = rows(tmp_path / "d.jsonl")
    assert (first, last) == ({"a": 0}, {"a": 2})
    assert isinstance(error, DataError)
    assert re.search(sentence, str(error)) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone.jsonl", r"gone\.jsonl: cannot be read \(no such file\); relative paths start at the working directory"),
        ("gone-*.jsonl", r"gone-\*\.jsonl: no file matches; relative paths"),
        ("folder", r"folder: is a folder; name its files, for example .*folder/\*\.parquet"),
        ("d.txt", r"d\.txt: cannot be read as a dataset; expected a file name that ends in \.jsonl, \.json, \.parquet"),
        ("object.json", r"object\.json: not a JSON array \(Expecting ',' delimiter"),
        ("latin.json", r"latin\.json: not a JSON array \('utf-8' codec"),
        ("deep.json", r"deep\.json: not a JSON array \("),
        ("twice.csv", r"twice\.csv, line 1: expected a header with a different name for each column, found 'a,a'"),
        ("latin.csv", r"latin\.csv, line 1: expected a header"),
        ("empty.arrow", r"empty\.arrow: "),
        ("text.arrow", r"text\.arrow: not a readable Arrow or Feather file \("),
        ("cut.feather", r"cut\.feather: not a readable Arrow or Feather file \("),
        ("text.parquet", r"text\.parquet: not a readable parquet file \(.*"),
        ("cut.parquet", r"cut\.parquet: not a readable parquet file \(.*"),
        ("empty.parquet", r"empty\.parquet: not a readable parquet file \(.*"),
    ],
)
def test_a_file_that_cannot_be_read_gets_one_sentence(tmp_path, name, sentence):
    (tmp_path / "folder").mkdir()
    (tmp_path / "d.txt").write_text("a,b")
    (tmp_path / "object.json").write_text('[{"a": 1} {"a": 2}]')
    (tmp_path / "latin.json").write_bytes(b'[{"a": "\xff"}]')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.csv").write_text("a,a\n1,2")
    (tmp_path / "latin.csv").write_bytes(b"a,\xff\n1,2")
    (tmp_path / "empty.arrow").touch()
    (tmp_path / "text.arrow").write_text("not at all Arrow, but long enough to be it")
    feather.write_feather(pa.table({"a": list(range(100))}), str(tmp_path / "whole.feather"))
    (tmp_path / "cut.feather").write_bytes((tmp_path / "whole.feather").read_bytes()[:-40])
    (tmp_path / "text.parquet").write_text("not at all parquet, but long enough to be one")
    (tmp_path / "empty.parquet").touch()
    pq.write_table(pa.table({"a": list(range(100))}), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=sentence) as caught:
        rows(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_csv_row_comes_with_its_line_all_values_are_text_and_empty_cells_are_null(tmp_path):
    text = '\ufeffquestion, answer,level\r\n"one, ""two""\nthree",007,\r\n\r\né,1e3,x\r\n'
    (tmp_path / "d.csv").write_text(text, encoding="utf-8", newline="")
    assert rows(tmp_path / "d.csv") == [
        (f"{tmp_path}/d.csv, line 3", {"question": 'one, "two"\nthree', "answer": "007", "level": None}),
        (f"{tmp_path}/d.csv, line 5", {"question": "é", "answer": "1e3", "level": "x"}),
    ]


def test_a_bad_csv_row_is_yielded_as_its_error_and_reading_continues(tmp_path):
    (tmp_path / "d.csv").write_bytes(b"a,b\n1\n1,2,3\n\xff,2\n1,2\n")
    *bad, (_, last) = rows(tmp_path / "d.csv")
    assert [str(error).removeprefix(f"{tmp_path}/d.csv, ").partition(";")[0] for _, error in bad] == [
        "line 2: 1 values for 2 columns", "line 3: 3 values for 2 columns", "line 4: not UTF-8 text",
    ]  # fmt: skip
    assert last == {"a": "1", "b": "2"}


def test_json_is_an_array_or_one_object_per_line(tmp_path):
    (tmp_path / "d.json").write_text(' \n[{"a": 1},\n {"a": 2}, 3]')
    (_, first), (where, second), (_, error) = rows(tmp_path / "d.json")
    assert (first, second, where) == ({"a": 1}, {"a": 2}, f"{tmp_path}/d.json, row 2")
    assert str(error) == f"{tmp_path}/d.json, row 3: expected a JSON object, found int"
    (tmp_path / "d.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert [row for _, row in rows(tmp_path / "d.json")] == [{"a": 1}, {"a": 2}]


def test_arrow_files_streams_and_feather_are_read_with_numbered_rows(tmp_path):
    table = pa.table({"n": list(range(3000)), "deep": [{"x": [i, None]} for i in range(3000)]})
    feather.write_feather(table, str(tmp_path / "d.feather"))
    for name, writer in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with writer(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=700)
    for name in ("d.feather", "file.arrow", "stream.arrow"):
        found = rows(tmp_path / name)
        assert [where for where, _ in found] == [f"{tmp_path}/{name}, row {i}" for i in range(1, 3001)]
        assert [row for _, row in found] == table.to_pylist()


def test_columns_are_renamed_and_a_missing_one_is_an_error_that_lists_those_there_are(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"q": 1, "final": 2, "prompt": "old", "level": 3}\n{"question": 1}\nno\n')
    path, mapping = str(tmp_path / "d.jsonl"), {"prompt": "q", "answer": "final"}
    (_, row), (_, missing), (_, broken) = read_rows(Source(path=path), columns=mapping)
    assert row == {"prompt": 1, "answer": 2, "level": 3}
    assert str(missing).endswith(
        "line 2: there is no column 'q', which data.columns names for 'prompt'; columns: question"
    )
    assert "not valid JSON" in str(broken)
    (_, own), *_ = read_rows(Source(path=path, columns={"prompt": "level"}), columns=mapping)
    assert own == {"q": 1, "final": 2, "prompt": 3}
    (_, plain), *_ = read_rows(Source(path=path, columns={}), columns=mapping)
    assert plain["prompt"] == "old"


def test_a_mapped_answer_comes_before_that_of_a_verl_row(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "final": "9", "reward_model": {"ground_truth": "1"}}')
    ((where, row),) = read_rows(Source(path=str(tmp_path / "d.jsonl")), columns={"answer": "final"})
    assert read_question(where, row, PromptFormat()).answer == "9"


def test_a_relative_name_with_a_data_suffix_is_never_looked_for_on_the_hub():
    for path in ("data/train.jsonl", "data/train.csv", "./data", "a/b/c", "train"):
        with pytest.raises(DataError, match="no such file"):
            rows(path)


def test_a_file_takes_no_params(tmp_path):
    (tmp_path / "d.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"d\.jsonl: a file takes no params, found 'split'"):
        rows(tmp_path / "d.jsonl", params={"split": "train"})


def test_a_value_that_python_cannot_hold_is_refused_with_its_rows(tmp_path):
    table = pa.table({"t": pa.array([0, 2**62], pa.timestamp("ms"))})
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet, rows 1 to 2: contain a value that cannot be read"):
        rows(tmp_path / "d.parquet")


def test_a_hub_dataset_is_read_with_its_name_split_and_revision(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = rows("openai/gsm8k", params={"name": "main", "revision": "abc"}, size=1)
    assert found == [("openai/gsm8k (main, train), row 1", {"question": "1+1", "answer": "2"})]
    assert asked == [(("openai/gsm8k", "main"), {"split": "train", "revision": "abc"})]
    with pytest.raises(DataError, match="openai/gsm8k: unknown params key 'subset'; a hub dataset takes name, split"):
        rows("openai/gsm8k", params={"subset": "main"})


def test_every_hub_failure_is_one_sentence(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def failing(error):
        def load_dataset(*args, **kwargs):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    failing(ConnectionError("Couldn't reach 'a/b' on the Hub\nand more"))
    with pytest.raises(DataError, match=r"a/b \(train\): no such file, and the hub cannot be reached"):
        rows("a/b")
    failing(datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist"))
    with pytest.raises(DataError, match="no such file, and no such dataset on the hub"):
        rows("a/b")
    failing(ValueError("Unknown split \"x\".\nShould be one of ['train']."))
    with pytest.raises(DataError, match=r"a/b \(x\): the hub dataset cannot be loaded \(ValueError: Unknown split"):
        rows("a/b", params={"split": "x"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"a/b: .*needs the package `datasets`: pip install -e '.*\[hub\]'"):
        rows("a/b")


def test_jsonl_is_read_line_by_line(tmp_path):
    # The first rows can be read before the bad line.
    (tmp_path / "d.jsonl").write_text("\n".join([json.dumps({"i": i}) for i in range(5)] + ["oops"]))
    reader = read_rows(Source(path=str(tmp_path / "d.jsonl")))
    assert next(reader)[1] == {"i": 0}


def test_a_line_that_is_too_long_is_one_bad_row_and_never_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo.data.formats._MAX_LINE", 100)
    (tmp_path / "d.jsonl").write_bytes(b'{"a": 0}\n{"a": "' + b"x" * 1000 + b'"}\n{"a": 2}\n{"b": "' + b"x" * 100)
    (_, first), (_, long), (_, third), (where, last) = rows(tmp_path / "d.jsonl")
    assert (first, third) == ({"a": 0}, {"a": 2})
    assert str(long) == f"{tmp_path}/d.jsonl, line 2: longer than 100 bytes; expected one question per line"
    assert (where, str(last).startswith(where)) == (f"{tmp_path}/d.jsonl, line 4", True)


def test_an_unknown_home_directory_is_not_a_file():
    with pytest.raises(DataError, match=r"~nobody-at-all/x\.jsonl: cannot be read"):
        rows("~nobody-at-all/x.jsonl")
