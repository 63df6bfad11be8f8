"""Exported CSV and JSON can be parsed by standard readers, without loss."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np

from dapo.view.curves import Curve, curves, curves_csv
from dapo.view.groups import group, group_json, groups
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import HOSTILE, create, make_group, make_report


def test_curves_survive_csv_to_the_last_digit(trained: Run):
    found = curves(trained, ["reward/mean", "entropy"])
    rows = list(csv.DictReader(io.StringIO(curves_csv(found))))
    for curve in found:
        assert [float(row[curve.name]) for row in rows] == curve.values.tolist()
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]


def test_curves_with_other_steps_odd_values_and_names_share_a_table():
    odd = 'a "name", with\nall'
    text = curves_csv(
        [Curve(odd, np.array([1, 2]), np.array([0.1, np.nan])), Curve("b", np.array([2, 5]), np.array([np.inf, 3.0]))]
    )
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["step", odd, "b"]
    assert rows == [["1", "0.1", ""], ["2", "nan", "inf"], ["5", "", "3.0"]]


def test_a_group_as_json_has_everything(trained: Run):
    serial = groups(trained).rows[0].serial
    found = group(trained, serial)
    parsed = json.loads(group_json(found))
    assert parsed["messages"] == list(found.messages)
    assert parsed["answer"] == found.answer
    assert [response["text"] for response in parsed["responses"]] == [response.text for response in found.responses]
    assert [response["advantage"] for response in parsed["responses"]] == [r.advantage for r in found.responses]


def test_hostile_texts_and_odd_numbers_survive_as_strict_json(tmp_path: Path):
    with create(tmp_path) as database:
        made = make_group(1, (True,) * len(HOSTILE), texts=HOSTILE, answer=[math.nan, math.inf])
        database.record_step(make_report(1, [made]))
    text = group_json(group(find_run(tmp_path, "made"), 1))
    parsed = json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert tuple(response["text"] for response in parsed["responses"]) == HOSTILE
    assert parsed["answer"] == ["nan", "inf"]
