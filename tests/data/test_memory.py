"""Test rows that a Python program gives: every kind of object gives the same questions, and faults name the row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from dapo.config import Source
from dapo.data.memory import collect
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import read_rows
from dapo.data.rows import Question, read_question
from dapo.errors import DataError

ROWS = [
    {"prompt": "one", "answer": 1, "level": 2.5, "tags": ["a", "b"]},
    {"prompt": "two", "answer": 2, "level": None, "tags": []},
]
SOURCE = Source(path="python:train_dataset")


def questions(rows, source: Source = SOURCE) -> list[Question]:
    found = []
    for where, row in read_rows(source, {SOURCE.path: collect("train_dataset", rows)}):
        if isinstance(row, DataError):
            raise row
        found.append(read_question(where, row, PromptFormat()))
    return found


def as_dataset(rows):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize(
    "make",
    [tuple, iter, pd.DataFrame, as_dataset, lambda rows: as_dataset(rows).to_iterable_dataset()],
    ids=["tuple", "generator", "DataFrame", "Dataset", "IterableDataset"],
)
def test_every_kind_of_rows_gives_the_questions_of_a_list(make):
    assert questions(make(ROWS)) == questions(ROWS)
    assert [question.where for question in questions(ROWS)] == ["train_dataset, row 1", "train_dataset, row 2"]


def test_size_takes_the_first_rows_as_for_files():
    assert len(questions(ROWS, Source(path=SOURCE.path, size=1))) == 1


def test_values_of_numpy_torch_and_pandas_become_plain_ones():
    row = {"prompt": "p", "answer": np.int64(3), "array": np.arange(2), "tensor": torch.tensor([0.5]), "flag": np.True_}
    (question,) = questions([row])
    assert (question.answer, question.extra) == (3, {"array": [0, 1], "tensor": [0.5], "flag": True})
    frame = pd.DataFrame({"prompt": ["p", "q"], "answer": ["1", "2"], "note": [np.nan, "x"], "day": [pd.NaT, pd.NaT]})
    assert questions(frame)[0].extra == {"note": None, "day": None}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"prompt": ["a"]}, "train_dataset is a dict with the keys prompt; expected rows: a list of dicts"),
        (5, "train_dataset is a int; expected rows: a list of dicts"),
        (["text"], "train_dataset, row 1: expected a dict of columns, found str"),
        ([*ROWS, {"question": "q"}], "train_dataset, row 3: column 'answer' is missing"),
        ([{"text": "q"}], "train_dataset, row 1: column 'prompt' is missing"),
        ([{"prompt": "q", "answer": object()}], "train_dataset, row 1: column 'answer' has a value of type object"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_that_names_the_row(rows, sentence):
    with pytest.raises(DataError) as found:
        questions(rows)
    assert str(found.value).startswith(sentence)


def test_rows_that_are_not_given_again_are_asked_for():
    with pytest.raises(DataError, match="were given to Trainer as train_dataset; give them again, from Python"):
        list(read_rows(SOURCE))
