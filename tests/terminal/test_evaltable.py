"""Tests of the evaluation tables."""

from __future__ import annotations

import io

from rich.console import Console

from dapo.terminal.evaltable import (
    DifferenceRow,
    EvalRow,
    differences_table,
    headline,
    models_table,
    summary,
    with_interval,
)

NAN = float("nan")
METRICS = {
    "reward/mean": 0.31, "reward/mean/low": 0.2, "reward/mean/high": 0.4,
    "avg@4": 0.25, "avg@4/low": 0.125, "avg@4/high": 0.375,
    "pass@1": 0.25, "pass@2": 0.4, "pass@2/low": 0.3, "pass@2/high": 0.5, "pass@4": 0.5,
    "maj@4": 0.3, "parse_rate": 0.9, "response_length/mean": 812.34, "response_length/clip_ratio": 0.0625,
    "problems": 30.0, "unjudged": 0.0,
}  # fmt: skip


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_rates_are_in_percent_with_their_intervals_and_other_metrics_are_not_scaled():
    assert with_interval(METRICS, "avg@4") == "25.0% [12.5, 37.5]"
    assert with_interval(METRICS, "reward/mean") == "0.310 [0.200, 0.400]"
    assert with_interval(METRICS, "response_length/mean") == "812.3"
    assert with_interval(METRICS, "avg@8") == ""
    assert with_interval({"avg@4": NAN}, "avg@4") == "-"


def test_the_headline_is_the_accuracy_if_there_is_one_else_the_reward():
    assert headline(METRICS) == ["avg@4", "pass@4", "maj@4"]
    assert headline({"reward/mean": 1.0}) == ["reward/mean"]


def test_the_summary_is_one_line_that_counts_unjudged_responses():
    line = summary({**METRICS, "unjudged": 3.0})
    assert line == (
        "avg@4 25.0% [12.5, 37.5]  pass@4 50.0%  maj@4 30.0%  reward 0.310 [0.200, 0.400]  length 812.3  "
        "cut off 6.2%  3 unjudged"
    )
    assert summary({"reward/mean": 0.5, "unjudged": 0.0}) == "reward 0.500"


def test_a_table_has_one_row_per_model_and_no_empty_columns():
    rows = [EvalRow("base[1]", METRICS, 12.4), EvalRow("run@3", METRICS, 13.0)]
    lines = [" ".join(line.split()) for line in shown(models_table("aime", rows, 120)).splitlines()]
    assert "model avg@4 pass@2 pass@4 maj@4 parsed cut off length s" in lines
    row = lines.index("base[1] 25.0 40.0 50.0 30.0 90.0 6.2 812.3 12")
    assert lines[row + 1] == "12.5–37.5"
    narrow = shown(models_table("aime", rows, 80))
    assert "pass@2" not in narrow and "pass@4" in narrow
    unjudged = models_table("aime", [EvalRow("a", {**METRICS, "unjudged": 7.0}, 1.0)], 80)
    assert "unjudged" in shown(unjudged)


def test_a_difference_counts_only_if_its_interval_excludes_zero():
    def verdict(low, high):
        return DifferenceRow("m", "avg@4", (low + high) / 2, low, high, 30).verdict

    assert verdict(0.01, 0.2) == "better"
    assert verdict(-0.2, -0.01) == "worse"
    assert verdict(-0.01, 0.2) == "no difference shown"
    assert verdict(0.0, 0.0) == "no difference shown"
    assert verdict(NAN, NAN) == "too few questions in common"


def test_differences_of_rates_are_in_percentage_points_and_those_of_rewards_are_not_scaled():
    rows = [DifferenceRow("m", "avg@4", 0.125, 0.05, 0.2, 30), DifferenceRow("m", "reward/mean", -0.5, -1.0, 0.5, 30)]
    text = shown(differences_table("base", rows))
    assert "difference from base, over the questions judged for both" in text
    assert "+12.5 points [+5.0, +20.0]" in text
    assert "-0.500 [-1.000, +0.500]" in text
    assert [line.split()[-1] for line in text.splitlines() if "points" in line] == ["better"]
    single = shown(differences_table("base", [DifferenceRow("m", "avg@4", 0.5, NAN, NAN, 1)]))
    assert "+50.0 points " in single and "nan" not in single
