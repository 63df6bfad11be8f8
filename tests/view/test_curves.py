"""Curves match what was recorded, and thinning keeps their spikes."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from dapo.store.database import RunDatabase
from dapo.types import EvalReport
from dapo.view.curves import (
    TOKENS_IN,
    Curve,
    curves,
    differences,
    evaluations,
    metric_names,
    spread,
    thinned,
    tokens_over_steps,
    verdicts_over_steps,
)
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import create, make_group, make_report


def recorded(run: Run) -> list[dict]:
    with RunDatabase.open_readonly(run.path) as database:
        return list(database.steps())


def test_every_metric_of_a_real_run_comes_back(trained: Run):
    steps = recorded(trained)
    names = sorted({name for step in steps for name in step} - {"step", "time"})
    assert metric_names(trained) == names
    assert len(names) > 20
    for curve in curves(trained, names):
        there = [step for step in steps if curve.name in step]
        assert curve.steps.tolist() == [step["step"] for step in there]
        np.testing.assert_array_equal(curve.values, [step[curve.name] for step in there])


def test_a_run_without_steps_has_no_curves(tmp_path: Path):
    create(tmp_path).close()
    run = find_run(tmp_path, "made")
    assert metric_names(run) == curves(run, ["reward/mean"]) == evaluations(run) == []
    assert len(spread(run).steps) == len(verdicts_over_steps(run).steps) == len(tokens_over_steps(run).steps) == 0


def test_odd_values_and_unknown_names(tmp_path: Path):
    with create(tmp_path) as database:
        for step, value in enumerate([1.0, math.nan, math.inf, -math.inf], start=1):
            database.record_step(make_report(step, metrics={"odd'; --": value}))
    run = find_run(tmp_path, "made")
    (curve,) = curves(run, ["no such", *metric_names(run)])
    np.testing.assert_array_equal(curve.values, [1.0, math.nan, math.inf, -math.inf])


@pytest.mark.parametrize("points", [10, 100, 999])
def test_thinning_keeps_spikes_ends_and_order(points: int):
    rng = np.random.default_rng(points)
    values = rng.normal(size=5_000)
    values[[1234, 3456]] = 50, -50
    values[2000:2100] = np.nan
    thin = thinned(Curve("c", np.arange(10, 5_010), values), points)
    assert len(thin.steps) <= points
    assert {10, 1244, 3466, 5009} <= set(thin.steps.tolist())
    assert (np.diff(thin.steps) > 0).all()
    np.testing.assert_array_equal(thin.values, values[thin.steps - 10])


def test_thinning_keeps_the_extremes_of_every_interval():
    values = np.random.default_rng(0).normal(size=900)
    thin = thinned(Curve("c", np.arange(900), values), 301)
    for part in np.array_split(np.arange(900), 100):
        assert {part[values[part].argmin()], part[values[part].argmax()], part[-1]} <= set(thin.steps)


def test_thinning_returns_a_short_curve_as_it_is_and_accepts_one_of_only_nan():
    short = Curve("c", np.arange(5), np.arange(5.0))
    assert thinned(short, 5) is short
    nothing = thinned(Curve("c", np.arange(100), np.full(100, np.nan)), 10)
    assert 1 < len(nothing.steps) <= 10


@pytest.mark.parametrize("column", ["reward", "score", "acc", "length"])
def test_the_spread_is_that_of_each_step_s_responses(generated: Run, column: str):
    by_step = defaultdict(list)
    with RunDatabase.open_readonly(generated.path) as database:
        for group in database.groups():
            values = [rollout[column] for rollout in database.rollouts(group["serial"])]
            by_step[group["generated_step"]] += [float(value) for value in values if value is not None]
    band = spread(generated, column)
    assert band.steps.tolist() == sorted(by_step) == [1, 2, 3]
    np.testing.assert_allclose(band.quantiles.T, [np.quantile(by_step[step], (0.1, 0.9)) for step in (1, 2, 3)])


def test_the_spread_of_many_steps_is_taken_at_some_of_them_and_the_last(tmp_path: Path):
    with create(tmp_path) as database:
        for step in range(1, 31):
            database.record_step(make_report(step, [make_group(step)]))
    band = spread(find_run(tmp_path, "made"), max_points=7)
    assert len(band.steps) == 7
    assert (band.steps[0], band.steps[-1]) == (1, 30)
    with pytest.raises(ValueError, match="not a per-response value"):
        spread(find_run(tmp_path, "made"), "text; DROP TABLE groups")


def test_verdicts_are_counted_by_the_step_in_which_the_group_was_sampled(generated: Run):
    with RunDatabase.open_readonly(generated.path) as database:
        counts = Counter((group["generated_step"], group["verdict"]) for group in database.groups())
    found = verdicts_over_steps(generated)
    assert found.steps.tolist() == [1, 2, 3]
    assert {"kept", "carried", "all_wrong"} <= set(found.parts)
    for verdict, values in found.parts.items():
        assert values.tolist() == [counts[step, verdict] for step in (1, 2, 3)]
    assert sum(values.sum() for values in found.parts.values()) == 3 * 64


def test_tokens_of_a_real_run_add_up_in_every_step(trained: Run):
    found = tokens_over_steps(trained)
    assert found.steps.tolist() == [1, 2, 3, 4]
    tokens_in = sum(found.parts[name] for name in TOKENS_IN)
    tokens_out = sum(values for name, values in found.parts.items() if name not in TOKENS_IN)
    assert (tokens_in > 0).all()
    np.testing.assert_array_equal(tokens_in, tokens_out)


def test_parts_thinned_to_fewer_points_are_means_over_intervals(tmp_path: Path):
    with create(tmp_path) as database:
        for step in range(1, 11):
            database.record_step(
                make_report(step, metrics={"tokens/trained": step, "tokensother": 1.0, "tokens/computed": 9.0})
            )
    found = tokens_over_steps(find_run(tmp_path, "made"), max_points=5)
    assert found.steps.tolist() == [2, 4, 6, 8, 10]
    assert {name: values.tolist() for name, values in found.parts.items()} == {"trained": [1.5, 3.5, 5.5, 7.5, 9.5]}


def test_evaluations_have_the_intervals_that_were_recorded(trained: Run):
    found = evaluations(trained)
    connection = sqlite3.connect(trained.path)
    stored = {step: json.loads(text) for step, text in connection.execute("SELECT step, metrics FROM evaluations")}
    connection.close()
    assert sorted(stored) == [0, 2, 4]
    by_metric = {curve.metric: curve for curve in found}
    assert {curve.dataset for curve in found} == {"data"}
    assert {"avg@2", "pass@2", "reward/mean", "problems"} <= set(by_metric)
    assert not any(name.endswith(("/low", "/high")) for name in by_metric)
    curve = by_metric["avg@2"]
    assert curve.steps.tolist() == [0, 2, 4]
    for bound, values in (("", curve.values), ("/low", curve.low), ("/high", curve.high)):
        np.testing.assert_array_equal(values, [stored[step].get(f"avg@2{bound}", np.nan) for step in (0, 2, 4)])
    assert not np.isnan(curve.low).any()
    assert np.isnan(by_metric["problems"].low).all()


def test_evaluations_of_several_sets_and_without_intervals(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_eval(EvalReport(3, "b", {"avg@1": 0.5, "avg@1/low": 0.25, "avg@1/high": 0.75}, ()))
        database.record_eval(EvalReport(6, "b", {"avg@1": math.nan}, ()))
        database.record_eval(EvalReport(6, "a", {"avg@1": 1.0, "low": 2.0}, ()))
    found = evaluations(find_run(tmp_path, "made"))
    assert [(curve.dataset, curve.metric) for curve in found] == [("a", "avg@1"), ("a", "low"), ("b", "avg@1")]
    np.testing.assert_array_equal(found[2].values, [0.5, math.nan])
    np.testing.assert_array_equal(found[2].high, [0.75, math.nan])


def test_the_options_in_which_runs_differ_are_listed(tmp_path: Path):
    create(tmp_path, "optim.lr=0.25", name="a").close()
    create(tmp_path, "optim.lr=0.25", "data.train_batch_size=7", name="b").close()
    create(tmp_path, "optim.lr=0.5", name="c").close()
    runs = [find_run(tmp_path, name) for name in "abc"]
    found = differences(runs)
    assert found.keys() == {"optim.lr", "data.train_batch_size"}
    assert [float(value) for value in found["optim.lr"]] == [0.25, 0.25, 0.5]
    assert found["data.train_batch_size"][1] == "7"
    assert differences(runs[:1]) == {}
