"""Arms compared at the end, at equal seconds and at equal tokens, and in plain words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dapo.ablation.plan import Budget, Plan
from dapo.ablation.records import Evaluation, RunRecord, Status, Training, _main_metrics, _training
from dapo.ablation.report import _charts, band
from dapo.ablation.results import Difference, compare, values_at
from dapo.ablation.tables import difference_text, explanation, print_result, result_json, value_text
from dapo.algorithm.crossed import contrast
from tests.ablation.recipes import plan_of, write_recipe

TRAINED = Training(4, 40.0, 4000.0, 0.5, 20.0, 0.25, 0.1, 100.0, 0.01, 3)
QUESTIONS = [f"q{i}" for i in range(60)]


def points(*rows: tuple[int, float, float, float], seed: int = 0) -> list[Evaluation]:
    """Evaluations from (step, seconds, tokens, mean); questions scatter around the mean alike in all of them."""
    scatter = np.random.default_rng(seed).normal(0, 0.1, len(QUESTIONS))
    scatter -= scatter.mean()
    return [
        Evaluation(step, seconds, tokens, dict(zip(QUESTIONS, mean + scatter, strict=True)))
        for step, seconds, tokens, mean in rows
    ]


def record(arm: str, seed: int, evaluations: Sequence[Evaluation], training: Training = TRAINED) -> RunRecord:
    curves = {name: np.arange(1.0, 5.0) for name in ("step", "entropy", "response_length/mean")}
    found = {"held_out": list(evaluations)}
    return RunRecord(f"{arm}-s{seed}", arm, seed, Status.FINISHED, None, {"held_out": "avg@2"}, found, training, curves)


def fast_and_slow(plan: Plan) -> list[RunRecord]:
    """`fast` has half the accuracy after as many steps, but needs a tenth of the seconds and as many tokens."""
    runs = []
    for seed in (5, 6):
        runs.append(record("fast", seed, points((0, 0, 0, 0.1), (4, 10, 4000, 0.3), seed=seed)))
        runs.append(record("recipe", seed, points((0, 0, 0, 0.1), (2, 50, 2000, 0.3), (4, 100, 4000, 0.6), seed=seed)))
    return runs


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(write_recipe(tmp_path), "fast: optim.lr=0.1", seeds=2, budget=Budget("steps", 4))


def test_time_to_accuracy_is_that_of_the_first_evaluation_at_the_level(plan: Plan):
    runs = fast_and_slow(plan)
    runs[3] = record("recipe", 6, points((0, 0, 0, 0.1), (2, 60, 3000, 0.31), (4, 90, 4000, 0.5), seed=6))
    result = compare(plan, runs, levels=[10, 30, 55, 90])
    fast, recipe = result.sets[0].arms
    assert [(each.level, each.runs) for each in fast.reached] == [(0.1, 2), (0.3, 2), (0.55, 0), (0.9, 0)]
    assert [(each.seconds, each.tokens) for each in recipe.reached[:2]] == [(0, 0), (55, 2500)]
    assert recipe.reached[2].runs == 1  # a mean over the one seed that reached it would flatter the arm
    assert math.isnan(recipe.reached[2].seconds)
    console = Console(file=StringIO(), width=120)
    print_result(console, result)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "55 s, 2,500 tokens" in shown
    assert "1 of 2 seeds" in shown
    assert "not reached" in shown
    assert json.loads(result_json(result))["sets"]["held_out"]["arms"]["fast"]["reached"][1]["tokens"] == 4000


def test_an_arm_is_compared_where_all_runs_had_spent_as_much(plan: Plan):
    (found,) = compare(plan, fast_and_slow(plan)).sets
    assert found.arms[0].at == {"seconds": 10, "tokens": 4000}
    fast, full = found.arms
    assert full.values == pytest.approx({"end": 0.6, "seconds": 0.14, "tokens": 0.6})
    assert full.at == {"seconds": 10, "tokens": 4000}
    assert full.differences == {}
    assert {where: each.value for where, each in fast.differences.items()} == pytest.approx(
        {"end": -0.3, "seconds": 0.3 - (0.1 + 0.2 * 10 / 50), "tokens": -0.3}
    )
    assert [fast.differences[where].verdict for where in ("end", "seconds", "tokens")] == ["worse", "better", "worse"]


def test_a_short_arm_does_not_shorten_the_comparison_of_the_others(plan: Plan, tmp_path: Path):
    wide = plan_of(write_recipe(tmp_path), "fast: optim.lr=0.1", "brief: optim.lr=0.2", seeds=2, budget=plan.budget)
    brief = [record("brief", seed, points((0, 0, 0, 0.1), (4, 5, 40, 0.1), seed=seed)) for seed in (5, 6)]
    result = compare(wide, [*fast_and_slow(plan), *brief])
    fast, brief, recipe = result.sets[0].arms
    assert [arm.at["tokens"] for arm in (fast, brief, recipe)] == [4000, 40, 40]
    assert fast.differences["tokens"].value == pytest.approx(-0.3)
    assert brief.differences["tokens"].value == pytest.approx(-0.2 * 40 / 2000)
    console = Console(file=StringIO(), width=160)
    print_result(console, result)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for words in ("at equal tokens", "10.0 against 10.4", "at 40 tokens", "30.0 against 60.0", "at 4,000 tokens"):
        assert words in shown, words
    assert len(re.findall(r"at [\d,]+ tokens", shown)) == 2, "nothing is shown for the reference itself"
    for arm in (fast, brief):
        for where, difference in arm.differences.items():
            assert arm.values[where] - arm.references[where] == pytest.approx(difference.value)
    assert json.loads(result_json(result))["sets"]["held_out"]["arms"]["brief"]["at"] == {"seconds": 5, "tokens": 40}


def test_a_budget_of_seconds_is_where_seconds_are_compared(plan: Plan):
    (found,) = compare(replace(plan, budget=Budget("seconds", 8)), fast_and_slow(plan)).sets
    assert [arm.at for arm in found.arms] == [{"seconds": 8, "tokens": 4000}] * 2


def test_a_run_that_is_not_finished_does_not_count(plan: Plan):
    runs = fast_and_slow(plan)
    runs[0] = replace(runs[0], status=Status.FAILED, reason="the disk is full")
    result = compare(plan, runs)
    fast, full = result.sets[0].arms
    assert (fast.seeds, full.seeds) == ([6], [5, 6])
    assert fast.differences["end"].value == pytest.approx(-0.3)  # against the same seed of the reference
    assert json.loads(result_json(result))["runs"][0]["failure"] == "the disk is full"


def test_a_run_that_ended_early_counts_with_its_last_evaluation_to_the_end(plan: Plan):
    runs = fast_and_slow(plan)
    runs[::2] = [replace(run, status=Status.ENDED_EARLY, reason="all were right") for run in runs[::2]]
    result = compare(plan, runs)
    (found,) = result.sets
    assert found.arms[0].at == {"seconds": 100, "tokens": 4000}
    assert found.arms[0].values == pytest.approx({"end": 0.3, "seconds": 0.3, "tokens": 0.3})
    assert found.arms[0].differences["seconds"].value == pytest.approx(-0.3)
    (chart,) = [each for each in _charts(result) if each["title"]["text"] == "held_out by seconds of training"]
    (fast,) = [each["data"] for each in chart["series"] if each["name"] == "fast"]
    assert fast[-1] == pytest.approx([100, 30])


def test_clip_higher_acted_if_any_arm_reached_its_clip(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "grpo", budget=Budget("steps", 4))
    evaluations = points((0, 0, 0, 0.1), (4, 10, 4000, 0.3))
    clipped = {"grpo": 0.0, "full": 0.04}
    runs = [record(r.arm, r.seed, evaluations, replace(TRAINED, clipped=clipped[r.arm])) for r in plan.runs]
    assert not any("clip" in note for note in compare(plan, runs).notes)


def test_an_arm_without_any_result_is_said_to_have_too_few(plan: Plan):
    (found,) = compare(plan, [run for run in fast_and_slow(plan) if run.arm != "fast"]).sets
    assert found.arms[0].differences["end"].verdict == "too few results"
    assert compare(plan, []).sets == []


def test_an_arm_with_one_seed_of_several_has_an_interval_but_no_verdict(plan: Plan):
    other = record("fast", 5, points((0, 0, 0, 0.1), (4, 10, 4000, 0.3), seed=9))
    runs = [other, *(run for run in fast_and_slow(plan) if run.arm != "fast")]
    result = compare(plan, runs)
    ending = result.sets[0].arms[0].differences["end"]
    assert ending.verdict == "one seed: no verdict"
    assert ending.value == pytest.approx(-0.3)
    assert ending.low < -0.3 < ending.high
    shared = "held_out: fast and recipe have results of only one seed in common"
    assert shared in " ".join(explanation(result))
    assert "Holm" not in explanation(result)[0]  # no comparison, so nothing that Holm's correction is over
    assert shared not in " ".join(explanation(compare(plan, fast_and_slow(plan))))


def test_an_ablation_with_one_seed_has_intervals_but_no_verdict(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "fast: optim.lr=0.1", "same: optim.lr=0.2", budget=Budget("steps", 4))
    ends = {"fast": 0.9, "same": 0.3, "recipe": 0.3}
    runs = [
        record(arm, 5, points((0, 0, 0, 0.1), (4, 9, 9, end), seed=9 * (arm == "fast"))) for arm, end in ends.items()
    ]
    result = compare(plan, runs)
    fast, same, _ = result.sets[0].arms
    assert 0.5 < fast.differences["end"].low < fast.differences["end"].high < 0.7  # clear for these questions
    assert {each.verdict for arm in (fast, same) for each in arm.differences.values()} == {"one seed: no verdict"}
    found = json.loads(result_json(result))
    ending = found["sets"]["held_out"]["arms"]["fast"]["differences"]["end"]
    assert (ending["verdict"], ending["seeds"]) == ("one seed: no verdict", 1)
    assert ending["p"] is None and ending["p_holm"] is None
    assert "With one seed there are no verdicts" in " ".join(found["explanation"])
    console = Console(file=StringIO(), width=120)
    print_result(console, result)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "one seed: no verdict" in shown
    assert not {"better", "worse", "Holm"} & set(re.findall(r"\w+", shown))


def test_seeds_without_a_common_question_do_not_count_for_a_verdict(plan: Plan):
    runs = fast_and_slow(plan)
    for run in runs[2:]:  # the second seed's questions differ between the arms
        found = [
            replace(e, values={f"{run.arm} {q}": v for q, v in e.values.items()}) for e in run.evaluations["held_out"]
        ]
        run.evaluations["held_out"][:] = found  # pyright: ignore[reportIndexIssue]
    result = compare(plan, runs)
    assert result.sets[0].arms[0].differences["end"].verdict == "one seed: no verdict"
    assert "results of only one seed in common" in " ".join(explanation(result))


def test_arms_with_two_seeds_each_but_one_in_common_are_told_why_they_have_no_verdict(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "fast: optim.lr=0.1", seeds=3, budget=Budget("steps", 4))
    ends = {("fast", 5): 0.3, ("fast", 6): 0.4, ("recipe", 6): 0.5, ("recipe", 7): 0.6}
    runs = [record(arm, seed, points((0, 0, 0, 0.1), (4, 9, 9, end), seed=seed)) for (arm, seed), end in ends.items()]
    result = compare(plan, runs)
    assert math.isnan(result.sets[0].arms[0].differences["end"].p_holm)
    assert "held_out: fast and recipe have results of only one seed in common" in " ".join(explanation(result))


def test_only_comparisons_that_were_made_are_counted(tmp_path: Path):
    arms = [f"{name}: optim.lr=0.{i}" for i, name in enumerate(("fast", "failed", "slow"), start=1)]
    plan = plan_of(write_recipe(tmp_path), *arms, seeds=2, budget=Budget("steps", 4))
    runs = fast_and_slow(plan)
    runs += [replace(record("failed", run.seed, []), status=Status.FAILED) for run in runs[::2]]
    assert "here 1)" in explanation(compare(plan, runs))[0]
    runs += [replace(run, arm="slow", name=f"slow-s{run.seed}") for run in runs[:4:2]]
    assert "here 2)" in explanation(compare(plan, runs))[0]


def test_a_difference_that_is_the_same_everywhere_is_not_called_too_few_results(plan: Plan):
    def runs(arm: str, value: float) -> list[RunRecord]:
        found = dict.fromkeys(QUESTIONS, value)
        return [record(arm, seed, [Evaluation(0, 0, 0, found), Evaluation(4, 9, 9, found)]) for seed in (5, 6)]

    (found,) = compare(plan, [*runs("fast", 0.0), *runs("recipe", 1.0)]).sets
    assert found.arms[0].differences["end"].verdict == "all differences are equal: no test"
    (found,) = compare(plan, [*runs("fast", 1.0), *runs("recipe", 1.0)]).sets
    assert found.arms[0].differences["end"].verdict == "no difference shown"


def test_an_arm_with_another_metric_is_left_out_and_named(plan: Plan):
    """A judge without `acc` makes the mean reward the main metric, which is not a rate."""
    runs = fast_and_slow(plan)
    evaluations = points((0, 0, 0, 7.0), (4, 10, 4000, 8.0))
    runs[::2] = [replace(record("fast", seed, evaluations), metric={"held_out": "reward/mean"}) for seed in (5, 6)]
    result = compare(plan, runs)
    (found,) = result.sets
    fast, recipe = found.arms
    assert found.metric == "avg@2"
    assert (fast.seeds, recipe.seeds) == ([], [5, 6])
    assert math.isnan(fast.values["end"]) and recipe.values["end"] == pytest.approx(0.6)
    assert fast.differences["end"].verdict == "too few results"
    assert "held_out: fast-s5, fast-s6 left out, with reward/mean in place of avg@2" in result.notes
    assert {series["name"] for chart in _charts(result) if "held_out" in chart["title"]["text"]
            for series in chart["series"] if "fast" in series["name"]} == set()  # fmt: skip


def test_a_run_that_ends_with_empty_batches_leaves_its_entropy_to_the_other_seeds(plan: Plan):
    runs = fast_and_slow(plan)
    empty = replace(TRAINED, entropy=math.nan)
    runs[0] = record("fast", 5, runs[0].evaluations["held_out"], empty)
    assert compare(plan, runs).trainings["fast"].entropy == 0.5
    runs[2] = record("fast", 6, runs[2].evaluations["held_out"], empty)
    console = Console(file=StringIO(), width=120)
    print_result(console, compare(plan, runs))
    assert "nan" not in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_end_is_the_last_tenth_and_dropped_counts_stale_tokens():
    steps = [
        {"step": i, "timing_s/step": 2.0, "tokens/generated": 100.0, "tokens/dropped/all_wrong": 10.0,
         "tokens/dropped/all_right": 5.0, "tokens/stale": 20.0, "tokens/trained": 65.0, "groups/generated": i,
         "entropy": float(i), "response_length/mean": 10.0 * i, "response_length/clip_ratio": 1.0 / i,
         "response_length/max": 7.0 if i == 3 else 2.0, "groups/dropped/all_wrong": 1.0}
        for i in range(1, 21)
    ]  # fmt: skip
    found = _training(steps)
    assert (found.steps, found.seconds, found.tokens) == (20, 40.0, 2000.0)
    assert (found.entropy, found.length) == (19.5, 195.0)  # of steps 19 and 20
    assert found.dropped == pytest.approx(0.35)
    assert found.cut_off == pytest.approx(20 / 210)  # weighted by the groups of each step
    assert (found.longest, found.flat_groups) == (7.0, 20.0)


def test_last_steps_without_a_value_do_not_take_a_seed_out_of_the_mean(plan: Plan):
    """Steps 19 and 20 used carried-over groups only, so they sampled no response."""
    steps = [{"step": i, "entropy": float(i)} | ({} if i > 18 else {"response_length/mean": 10.0 * i})
             for i in range(1, 21)]  # fmt: skip
    found = _training(steps)
    assert (found.entropy, found.length) == (19.5, 175.0)  # the length of steps 17 and 18
    runs = fast_and_slow(plan)
    runs[0] = record("fast", 5, runs[0].evaluations["held_out"], found)
    assert compare(plan, runs).trainings["fast"].length == (175.0 + TRAINED.length) / 2
    assert math.isnan(_training([{"step": 1}]).length)


def test_a_difference_that_is_rounded_to_zero_has_no_minus_sign():
    assert difference_text("avg@2", Difference(-0.0004, -0.01, 0.0001, 1.0, 3, 1.0)) == "+0.0 [-1.0, +0.0]"


def test_an_arm_without_a_finished_reference_shows_where_its_value_is(plan: Plan, tmp_path: Path):
    wide = plan_of(write_recipe(tmp_path), "fast: optim.lr=0.1", "brief: optim.lr=0.2", seeds=2, budget=plan.budget)
    brief = [record("brief", seed, points((0, 0, 0, 0.1), (4, 5, 40, 0.1), seed=seed)) for seed in (5, 6)]
    (found,) = compare(wide, [*(run for run in fast_and_slow(plan) if run.arm == "fast"), *brief]).sets
    shown = {arm.arm: value_text(found, arm, "tokens") for arm in found.arms}
    assert shown["brief"] == "10.0\nat 40 tokens" and shown["fast"].endswith("\nat 4,000 tokens")


@pytest.mark.parametrize("value", [i / 30 for i in range(31)])
def test_values_that_do_not_change_are_the_same_bits_at_every_point(value):
    found = [replace(each, values=dict.fromkeys(QUESTIONS, value)) for each in points((0, 0, 0, 0.0), (2, 3, 50, 0.2))]
    for at in np.linspace(0, 4, 30):
        assert set(values_at(found, "seconds", float(at)).values()) == {value}


def test_values_lie_on_the_line_between_two_evaluations():
    found = points((0, 0, 0, 0.0), (2, 3, 50, 0.2), (4, 9, 80, 0.8))
    means = np.array([each.mean for each in found])
    for at in (0.0, 1.0, 3.0, 5.0, 9.0):
        values = values_at(found, "seconds", at)
        assert np.mean(list(values.values())) == pytest.approx(np.interp(at, [0, 3, 9], means))
    for question in QUESTIONS[:3]:
        expected = np.interp(65, [0, 50, 80], [each.values[question] for each in found])
        assert values_at(found, "tokens", 65)[question] == pytest.approx(expected)
    assert values_at(found, "end", math.inf) is found[-1].values
    assert values_at(found[:1], "seconds", 0.0) == found[0].values


def test_words_are_those_of_holms_correction_and_intervals_those_of_one_comparison(tmp_path: Path):
    arms = [f"a{i}: optim.lr=0.{i}" for i in range(1, 9)]
    plan = plan_of(write_recipe(tmp_path), *arms, seeds=5, budget=Budget("steps", 4))
    rng = np.random.default_rng(0)
    runs = []
    for run in plan.runs:
        values = dict(zip(QUESTIONS, rng.normal(0.5 + 0.05 * (run.arm == "a3"), 0.1, 60), strict=True))
        runs.append(record(run.arm, run.seed, [Evaluation(0, 0, 0, values), Evaluation(4, 9, 9, values)]))
    (found,) = compare(plan, runs).sets
    by_arm = {arm.arm: arm for arm in found.arms}
    cells = {arm: {} for arm in by_arm}
    for run in runs:
        cells[run.arm] |= {(run.seed, q): value for q, value in run.evaluations["held_out"][-1].values.items()}
    for arm, each in by_arm.items():
        if arm != "recipe":
            expected = contrast(cells["recipe"], cells[arm])
            assert each.differences["end"].low == expected.low
            assert each.differences["end"].p == expected.p
            assert each.differences["end"].p_holm >= expected.p
    unclear = [d for arm in found.arms if (d := arm.differences.get("end")) and d.p < 0.05 <= d.p_holm]
    assert unclear, "choose a seed in which the correction matters"
    assert {each.verdict for each in unclear} == {"no difference shown"}


def test_the_result_is_printed_in_plain_words(plan: Plan):
    console = Console(width=120, record=True, file=StringIO())
    print_result(console, compare(plan, fast_and_slow(plan)))
    text = console.export_text()
    assert "held_out: avg@2 in %, 60 questions; differences from recipe [95%]" in text
    assert "after 4 steps" in text and "at 10 s" in text and "at 4,000 tokens" in text
    assert "-30.0 [-30.0, -30.0]" in text
    assert "worse" in text and "better" in text
    assert "Holm's correction over the arms in a column (here 1)" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_of_arms_are_not_folded_at_80_columns(tmp_path: Path, is_terminal: bool):
    plan = plan_of(write_recipe(tmp_path), families=["ladder"], seeds=2, budget=Budget("steps", 4))
    runs = [record(r.arm, r.seed, points((0, 0, 0, 0.1), (4, 9, 4000, 0.3), seed=len(r.arm))) for r in plan.runs]
    console = Console(file=StringIO(), width=80, force_terminal=is_terminal, color_system=None)
    print_result(console, compare(plan, runs, levels=[30]))
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    for arm in plan.arms:  # in each of the three tables
        assert sum(line.startswith(f" {arm.name} ") for line in lines) == 3, arm.name


def test_the_json_has_what_the_report_shows(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "fast: algorithm.loss=gspo", seeds=2, budget=Budget("steps", 4))
    runs = fast_and_slow(plan)
    runs[0].curves["entropy"][1] = math.nan  # of a step with an empty batch
    result = compare(plan, runs)
    found = json.loads(result_json(result))
    assert found["arms"] == {"fast": plan.options_of(plan.arms[0]), "recipe": []}
    assert {"algorithm.loss=gspo", "algorithm.clip_ratio_low=0.0003"} <= {*found["arms"]["fast"]}
    assert found["model"] == str(tmp_path / "model")
    assert found["runs"][0]["curves"] == {
        "step": [1, 2, 3, 4], "entropy": [1, None, 3, 4], "response_length/mean": [1, 2, 3, 4],
    }  # fmt: skip
    assert found["explanation"] == explanation(result)
    assert "Holm's correction over the arms in a column (here 1)" in found["explanation"][0]
    point = {"step": 2, "seconds": 50, "tokens": 2000, "mean": 0.3}
    assert found["runs"][1]["evaluations"]["held_out"][1] == pytest.approx(point)


def test_arms_without_a_common_question_are_told_why_they_have_no_verdict(plan: Plan):
    """An environment can begin its episodes with other messages, which makes other questions."""
    runs = fast_and_slow(plan)
    sentence = "held_out: fast and recipe have no judged question in common, so they cannot be compared."
    assert sentence not in explanation(compare(plan, runs))
    for run in runs[::2]:
        found = [replace(e, values={f"own {q}": v for q, v in e.values.items()}) for e in run.evaluations["held_out"]]
        run.evaluations["held_out"][:] = found  # pyright: ignore[reportIndexIssue]
    result = compare(plan, runs)
    assert result.sets[0].arms[0].differences["end"].verdict == "too few results"
    assert sentence in explanation(result)


def test_responses_that_could_not_be_judged_are_named_with_their_arms(plan: Plan):
    runs = fast_and_slow(plan)
    assert not any("judged" in note for note in compare(plan, runs).notes)
    evaluations = runs[0].evaluations["held_out"]
    runs[0] = record("fast", 5, [*evaluations[:-1], replace(evaluations[-1], unjudged=0.25)])
    assert (
        "held_out: responses that could not be judged are left out; in the last evaluations these were 12.5% of fast"
        in compare(plan, runs).notes
    )


def test_a_question_counts_where_it_was_judged_even_if_it_was_not_before():
    first, last = points((0, 0, 0, 0.0), (2, 3, 50, 0.2))
    first = replace(first, values={})
    assert values_at([first, last], "seconds", 3.0) == last.values
    assert values_at([first, last], "seconds", 2.0) == {}


@pytest.mark.parametrize(
    ("metrics", "main"),
    [
        ([{"reward/mean": 0.1, "avg@2": 0.1}, {"reward/mean": 0.3, "avg@2": 0.2}], "avg@2"),
        ([{"reward/mean": math.nan}, {"reward/mean": 0.3, "avg@2": 0.2}], "avg@2"),
        ([{"reward/mean": 0.1, "avg@2": 0.1}, {"reward/mean": 0.3}], "reward/mean"),
        ([{"reward/mean": math.nan}], "reward/mean"),
    ],
)
def test_the_main_metric_is_one_that_all_judged_evaluations_have(metrics, main):
    assert _main_metrics([{"name": "held_out", "metrics": each} for each in metrics]) == {"held_out": main}


def test_questions_that_differ_between_seeds_are_mentioned(plan: Plan):
    runs = fast_and_slow(plan)
    assert not any("questions differ" in line for line in explanation(compare(plan, runs)))
    for run in runs[2:]:
        found = [replace(e, values={f"own {q}": v for q, v in e.values.items()}) for e in run.evaluations["held_out"]]
        run.evaluations["held_out"][:] = found  # pyright: ignore[reportIndexIssue]
    assert "held_out: the questions differ between seeds; 120 counts all of them." in explanation(compare(plan, runs))


def test_a_question_that_could_not_be_judged_is_not_taken_for_seeds_that_differ(plan: Plan):
    runs = fast_and_slow(plan)
    *_, last = runs[0].evaluations["held_out"]
    judged = replace(last, values={q: v for q, v in last.values.items() if q != "q0"}, unjudged=1 / 60)
    runs[0] = record("fast", 5, [*runs[0].evaluations["held_out"][:-1], judged])
    assert not any("questions differ" in line for line in explanation(compare(plan, runs)))


def test_an_arm_that_leaves_out_a_question_is_not_taken_for_seeds_that_differ(plan: Plan):
    runs = fast_and_slow(plan)
    for run in runs[::2]:
        found = [
            replace(e, values={q: v for q, v in e.values.items() if q != "q0"}) for e in run.evaluations["held_out"]
        ]
        run.evaluations["held_out"][:] = found  # pyright: ignore[reportIndexIssue]
    assert not any("questions differ" in line for line in explanation(compare(plan, runs)))


def test_an_interval_of_a_rate_ends_where_rates_end():
    assert difference_text("avg@2", Difference(0.1, -0.86, 1.057, 0.6, 3, 0.6)) == "+10.0 [-86.0, +100.0]"
    assert difference_text("score/mean", Difference(0.1, -0.86, 1.057, 0.6, 3, 0.6)) == "+0.100 [-0.860, +1.057]"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"cut_off": 0.0}, "no response was cut off at 8 tokens"),
        ({"longest": 4.0}, "the longest response has 4 tokens and the overlong penalty starts above 7"),
        ({"clipped": 0.0}, "no token reached the upper clip of 0.2"),
        ({"flat_groups": 0, "dropped": 0.0}, "so dynamic sampling had nothing to act on"),
        ({"flat_groups": 0, "dropped": 0.5}, "act on; the dropped tokens are of groups that were cut off, unjudged"),
    ],
)
def test_a_technique_that_had_nothing_to_act_on_is_named(tmp_path: Path, changed, sentence):
    plan = plan_of(write_recipe(tmp_path), "grpo", budget=Budget("steps", 4))
    evaluations = points((0, 0, 0, 0.1), (4, 10, 4000, 0.3))

    def notes(training: Training) -> str:
        return "\n".join(compare(plan, [record(r.arm, r.seed, evaluations, training) for r in plan.runs]).notes)

    assert notes(TRAINED) == ""
    assert sentence in notes(replace(TRAINED, **changed))


def test_a_band_covers_the_seeds_up_to_where_the_first_one_ends():
    x, mean, low, high = band([(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 0.0])),
                               (np.array([0.0, 3.0]), np.array([0.0, 3.0]))])  # fmt: skip
    assert x.tolist() == [0, 2, 3]
    assert (low.tolist(), high.tolist(), mean.tolist()) == ([0, 2, 1], [0, 2, 3], [0, 2, 2])


def test_no_seed_drops_out_of_a_band_where_it_has_no_value():
    """A step whose batch was empty has no entropy, and one that sampled nothing has no response length."""
    x, none = np.arange(1.0, 6.0), math.nan
    gaps, whole = np.array([none, 10.0, none, 30.0, none]), np.array([50.0, 50.0, 60.0, 70.0, 80.0])
    x_of_band, mean, low, high = band([(x, gaps), (x, whole), (x, np.full(5, none))])
    assert x_of_band.tolist() == [2, 3, 4]
    assert (low.tolist(), high.tolist(), mean.tolist()) == ([10, 20, 30], [50, 60, 70], [30, 40, 50])


@pytest.mark.parametrize("members", [[], [(np.arange(2.0), np.full(2, math.nan))], [(np.array([]), np.array([]))]])
def test_a_band_of_curves_without_values_is_empty(members):
    assert [len(each) for each in band(members)] == [0, 0, 0, 0]


def test_arms_without_a_value_have_an_empty_curve(plan: Plan):
    runs = fast_and_slow(plan)
    for run in runs[::2]:
        run.curves["entropy"][:] = math.nan
    (chart,) = [each for each in _charts(compare(plan, runs)) if each["title"]["text"] == "Entropy"]
    lengths = {each["name"]: len(each["data"]) for each in chart["series"]}
    assert (lengths["fast"], lengths["recipe"]) == (0, 4)
