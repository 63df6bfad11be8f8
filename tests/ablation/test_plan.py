"""The plan of an ablation: resolved before the first run, kept in a file, and the same when it is resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from dapo.ablation.plan import Budget
from dapo.errors import CheckpointError, ConfigError, NotReady
from tests.ablation.recipes import plan_of, write_recipe


def test_every_arm_has_every_seed_and_the_reference_comes_first(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path, run={"seed": 7}), "hot: optim.lr=0.1", seeds=2, out=tmp_path / "out")
    assert [run.config.run.name for run in plan.runs] == ["recipe-s7", "hot-s7", "recipe-s8", "hot-s8"]
    assert {run.config.run.dir for run in plan.runs} == {str(tmp_path / "out" / "runs")}
    assert [run.config.run.seed for run in plan.runs] == [7, 7, 8, 8]
    assert {run.config.run.steps for run in plan.runs} == {2}
    assert [run.config.optim.lr for run in plan.runs] == [0.001, 0.1, 0.001, 0.1]


def test_without_a_budget_the_recipes_own_length_counts(tmp_path: Path):
    assert plan_of(write_recipe(tmp_path), "a: optim.lr=0.1", budget=None).budget == Budget("steps", 6)
    recipe = write_recipe(tmp_path, run={"epochs": 2, "steps": None})
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=None)
    assert plan.budget == Budget("epochs", 2)
    assert {(run.config.run.steps, run.config.run.epochs) for run in plan.runs} == {(None, 2)}
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=Budget("seconds", 5))
    assert all(run.config.run.epochs is None and run.config.run.steps > 1000 for run in plan.runs)


def test_a_budget_of_one_is_in_the_singular():
    units = ("steps", "epochs", "seconds", "tokens")
    ones = ["1 step", "1 epoch", "1 second of training", "1 generated token"]
    assert [str(Budget(unit, 1)) for unit in units] == ones
    assert str(Budget("tokens", 2000)) == "2,000 generated tokens"


def test_each_arm_that_cannot_load_is_named_in_a_sentence_of_its_own(tmp_path: Path):
    recipe = write_recipe(tmp_path)
    with pytest.raises(NotReady) as refused:
        plan_of(recipe, "a: optim.lr=much", "b: algorithm.clip_ratio_hihg=1", "c: optim.lr=0.1")
    a, b = refused.value.sentences
    assert a.startswith("arm 'a': ") and "'optim.lr' is 'much'" in a
    assert b.startswith("arm 'b': ") and "did you mean 'algorithm.clip_ratio_high'" in b


def test_the_same_problem_of_all_arms_is_said_once(tmp_path: Path):
    recipe = write_recipe(tmp_path, optim={"lr_schedule": "cosine"})
    with pytest.raises(NotReady) as refused:
        plan_of(recipe, "a: optim.lr=0.1", "b: optim.lr=0.2", budget=Budget("seconds", 5))
    (sentence,) = refused.value.sentences
    assert sentence.startswith("--seconds: optim.lr_schedule cosine needs")


@pytest.mark.parametrize(
    ("sections", "overrides", "budget", "sentence"),
    [
        ({"eval": {"data": None}}, [], None, r"eval.data is missing; arms are compared on held-out questions"),
        ({"eval": {"k": 0}}, [], None, r"eval.k is missing"),
        (
            {},
            [f"run.seed={2**63 - 2}"],
            None,
            r"^run.seed is 9223372036854775806, but the last of --seeds 3 would exceed the greatest seed, 92\d+; lower",
        ),
        ({}, ["run.dir=here"], None, "choose their folder with --out"),
        ({"optim": {"lr_schedule": "linear"}}, [], Budget("tokens", 9), "--tokens: optim.lr_schedule linear needs"),
    ],
)
def test_a_recipe_that_cannot_be_ablated_is_refused(tmp_path, sections, overrides, budget, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_of(write_recipe(tmp_path, **sections), "a: optim.lr=0.1", overrides=overrides, budget=budget, seeds=3)


def test_the_last_seed_may_be_the_greatest(tmp_path: Path):
    recipe = write_recipe(tmp_path, run={"seed": 2**63 - 2})
    assert plan_of(recipe, "a: optim.lr=0.1", seeds=2).seeds == [2**63 - 2, 2**63 - 1]


def test_resuming_needs_the_same_recipe_budget_and_arms_but_may_add_arms_and_seeds(tmp_path: Path):
    recipe = write_recipe(tmp_path)
    plan = plan_of(recipe, "a: optim.lr=0.1", seeds=2)
    with pytest.raises(CheckpointError, match="there is no ablation to resume"):
        plan.check_folder(resume=True)
    plan.check_folder(resume=False)
    plan.write()
    assert yaml.safe_load((plan.out / "ablation.yaml").read_text())["arms"] == {"a": ["optim.lr=0.1"], "recipe": []}
    plan.check_folder(resume=True)
    with pytest.raises(CheckpointError, match="already holds this ablation; continue it with --resume"):
        plan.check_folder(resume=False)
    plan_of(recipe, "a: optim.lr=0.1", "b: optim.lr=0.2", seeds=3).check_folder(resume=True)
    others = {
        r"its rollout.n is 4, not 8": plan_of(recipe, "a: optim.lr=0.1", seeds=2, overrides=["rollout.n=8"]),
        r"its run.seed is 5, not 6": plan_of(recipe, "a: optim.lr=0.1", seeds=2, overrides=["run.seed=6"]),
        "its budget is 2 steps, not 3 steps": plan_of(recipe, "a: optim.lr=0.1", seeds=2, budget=Budget("steps", 3)),
        r"its arm 'a' has \['optim.lr=0.1'\], not \['optim.lr=0.2'\]": plan_of(recipe, "a: optim.lr=0.2", seeds=2),
        "has the arm 'a', which this command leaves out": plan_of(recipe, "c: optim.lr=0.1", seeds=2),
        "has the seeds 5, 6, and this command leaves out 6; give --seeds 2": plan_of(
            recipe, "a: optim.lr=0.1", seeds=1
        ),
        "its reference is recipe, not full": plan_of(recipe, "grpo", seeds=2),
    }
    for sentence, other in others.items():
        with pytest.raises(CheckpointError, match=sentence):
            other.check_folder(resume=True)
        with pytest.raises(CheckpointError, match=sentence):  # and not that --resume would help
            other.check_folder(resume=False)


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "\0", "config: {}", "arms: 3\nseeds: [1]", "arms: {}\nseeds: [[1]]", "arms: {}\nseeds: [1]",
        "arms: {}\nseeds: [1]\nbudget: {}",
    ],
)  # fmt: skip
def test_a_damaged_plan_is_refused(tmp_path: Path, text: str):
    plan = plan_of(write_recipe(tmp_path), "a: optim.lr=0.1")
    plan.write()
    (plan.out / "ablation.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((CheckpointError, ConfigError), match=r"ablation\.yaml: "):
        plan.check_folder(resume=True)


def test_an_ablation_killed_while_its_plan_is_written_can_start_again(tmp_path: Path, monkeypatch):
    plan = plan_of(write_recipe(tmp_path), "a: optim.lr=0.1", out=tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if (child := os.fork()) == 0:
            plan.write()
        assert os.waitpid(child, 0)[1] != 0
    assert len(list(plan.out.iterdir())) == 1
    plan.check_folder(resume=False)
    plan.write()
    plan.check_folder(resume=True)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "a: optim.lr=0.1", out=tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(CheckpointError, match="holds something else"):
        plan.check_folder(resume=False)


def test_the_options_of_an_arm_include_those_that_its_loss_sets(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "a: algorithm.loss=gspo", "b: optim.lr=0.1", families=["ladder"])
    options = {arm.name: plan.options_of(arm) for arm in plan.arms}
    assert options["a"][0] == "algorithm.loss=gspo"
    assert set(options["a"][1:]) >= {"algorithm.clip_ratio_c=null", "algorithm.clip_ratio_low=0.0003"}
    assert options["b"] == ["optim.lr=0.1"]
    for name, overrides in ((arm.name, arm.overrides) for arm in plan.arms if arm.name != "a"):
        assert options[name] == list(overrides)


def test_only_what_acts_after_the_first_evaluation_may_differ_to_share_it(tmp_path: Path):
    plan = plan_of(
        write_recipe(tmp_path), "grpo", "hot: optim.lr=0.1", "short: data.max_response_length=4",
        "judge: reward.threshold=0.5", seeds=2,
    )  # fmt: skip
    first = {run.arm: run for run in plan.runs if run.seed == 5}
    assert {arm for arm, run in first.items() if run.has_base_of(first["full"])} == {"grpo", "hot", "full"}
    assert not plan.runs[0].has_base_of(plan.runs[len(first)])  # the same arm with another seed
