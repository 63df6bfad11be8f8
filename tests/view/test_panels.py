"""The panels draw what was recorded: one color per name, and gaps where a step has no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.view.curves import curves, spread
from dapo.view.page.charts import Line, Look, line_chart
from dapo.view.page.panels import all_charts, load
from dapo.view.report import write_report
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import create, make_group, make_report
from tests.view.test_report import drawn


def colors(charts: dict[str, Any], key: str) -> dict[str, str]:
    return {series["name"]: series["itemStyle"]["color"] for series in charts[key]["series"]}


def test_what_occurs_in_several_charts_has_one_color_in_all_of_them(tmp_path: Path):
    reasons = ("all_right", "all_wrong", "stale", "too_easy")
    tokens = {f"tokens/dropped/{reason}": 5.0 for reason in reasons if reason != "stale"}
    tokens |= {f"tokens/{name}": 9.0 for name in ("trained", "stale", "carried_out", "masked")}
    speeds = {f"throughput/{name}_tokens_per_s": 7.0 for name in ("generated", "trained")}
    times = {f"timing_s/{name}": 1.0 for name in ("generate", "reward", "train")}
    made = [make_group(serial, verdict=verdict) for serial, verdict in enumerate(("kept", "carried", *reasons))]
    with create(tmp_path) as database:
        database.record_step(make_report(1, made, {"reward/mean": 0.5, **tokens, **speeds, **times}))
    charts = all_charts([load(find_run(tmp_path, "made"))], Look())
    groups, spent = colors(charts, "verdicts made"), colors(charts, "tokens made")
    assert [*groups] == ["kept", "all right", "all wrong", "carried", "stale", "too easy"]
    assert len(set(groups.values())) == len(groups) and len(set(spent.values())) == len(spent)
    same = {"kept": "trained", "carried": "carried out", "stale": "stale"}
    assert {name: spent[same.get(name, f"dropped: {name}")] for name in groups} == groups
    speed, time = colors(charts, "Throughput"), colors(charts, "phases made")
    assert speed["trained"] == spent["trained"] == time["train"]
    assert speed["generated"] == time["generate"]
    assert colors(charts, "Reward")["reward"] == time["reward"]


def test_only_tokens_that_are_never_trained_on_are_called_waste(trained: Run):
    unit = all_charts([load(trained)], Look())["tokens real"]["title"]["subtext"]
    assert "all but trained and carried out is waste" in unit


@pytest.fixture
def gappy(tmp_path: Path) -> Run:
    """A run of seven steps, of which 2, 4, 5 and 7 sampled nothing and have no score."""
    with create(tmp_path, name="gappy") as database:
        for step in range(1, 8):
            scores = {"reward/mean": step / 10, "acc/mean": 0.5} if step in (1, 3, 6) else {}
            made = [make_group(step)] if scores else []
            database.record_step(make_report(step, made, {"grad_norm": float(step), **scores}))
    return find_run(tmp_path, "gappy")


def test_a_step_without_a_value_is_a_gap(gappy: Run):
    assert [curve.steps.tolist() for curve in curves(gappy, ["reward/mean"])] == [[1, 3, 6]]  # as saved in a CSV
    (found,) = curves(gappy, ["reward/mean"], with_gaps=True)
    assert found.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(found.values, [0.1, np.nan, 0.3, np.nan, np.nan, 0.6])
    band = spread(gappy)
    assert band.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.isnan(band.quantiles).any(axis=0).tolist() == [False, True, False, True, True, False, True]
    charts = all_charts([load(gappy)], Look())
    assert [value for _, value in charts["Accuracy"]["series"][0]["data"]] == [0.5, None, 0.5, None, None, 0.5]
    assert None not in [value for _, value in charts["Gradient norm"]["series"][0]["data"]]


def test_a_value_between_gaps_is_a_dot():
    values = np.array([1.0, np.nan, 2.0, 3.0, 0.0, 4.0])
    line = Line("a", np.arange(6), values, "red")
    dots = line_chart("t", "u", [line], Look())["series"][1]
    assert (dots["data"], dots["showSymbol"]) == ([[0, 1.0]], True)
    dots = line_chart("t", "u", [line], Look(is_log=True))["series"][1]
    assert dots["data"] == [[0, 1.0], [5, 4.0]]
    assert len(line_chart("t", "u", [Line("a", np.arange(2, 4), values[2:4], "red")], Look())["series"]) == 1


def test_dots_are_visible_in_a_browser(page: Any, gappy: Run, tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    write_report(gappy.path.parent, tmp_path / "it.html")
    page.goto((tmp_path / "it.html").as_uri())
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_timeout(500)
    titles = [options["title"]["text"] for options in all_charts([load(gappy)], Look()).values()]
    pixels = dict(zip(titles, drawn(page), strict=True))
    assert 20 < pixels["Accuracy"] < pixels["Gradient norm"] / 2  # three dots, and no line between them
