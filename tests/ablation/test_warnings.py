"""Warnings about an ablation before its first run: arms that train identically, and results that could mislead."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.ablation.warnings import warnings
from tests.ablation.recipes import plan_of, write_recipe

IDENTICAL = "will train identically"


def found_warnings(recipe: Path, *arms: str, **changes) -> str:
    return "\n".join(warnings(plan_of(recipe, *arms, **changes)))


def test_a_clip_that_cannot_act_is_told_before_the_first_run(tmp_path: Path):
    recipe = write_recipe(tmp_path)
    one = ["optim.ppo_mini_batch_size=4"]
    sentence = "+overlong-filter and +clip-higher will train identically: only the clip differs"
    assert sentence in found_warnings(recipe, families=["ladder"], overrides=one)
    assert sentence not in found_warnings(recipe, families=["ladder"])  # two updates per batch
    assert sentence not in found_warnings(recipe, families=["ladder"], overrides=[*one, "optim.ppo_epochs=2"])
    assert sentence not in found_warnings(recipe, families=["ladder"], overrides=[*one, "rollout.mode=inflight"])
    # Groups that are carried over are trained on other weights than they were sampled from.
    assert IDENTICAL not in found_warnings(recipe, "no-clip-higher", overrides=one)
    carried_nothing = [*one, "algorithm.max_staleness=0"]
    assert f"no-clip-higher and full {IDENTICAL}" in found_warnings(recipe, "no-clip-higher", overrides=carried_nothing)


VLLM = ["rollout.engine=vllm", "cluster.rollout_workers=1"]


@pytest.mark.parametrize(
    ("options", "is_idle"),
    [
        ([], False),  # dynamic sampling carries groups over
        (["algorithm.filter_groups.enable=false"], False),  # a round of 6 fills a batch of 4: 2 are carried over
        (["algorithm.filter_groups.enable=false", "data.gen_batch_size=4"], True),
        (["algorithm.filter_groups.enable=false", "data.gen_batch_size=4", "algorithm.overlong_filter=true"], False),
        (["algorithm.importance_correction=token-truncated"], True),  # r = new / start of the step
        (["algorithm.importance_correction=token-truncated", "optim.ppo_epochs=2"], False),
        (VLLM, True),  # has a correction by default
        ([*VLLM, "algorithm.importance_correction=none", "algorithm.max_staleness=0"], False),
    ],
)
def test_a_clip_cannot_act_exactly_where_all_ratios_are_one(tmp_path: Path, options, is_idle):
    text = found_warnings(
        write_recipe(tmp_path), "a: algorithm.clip_ratio_high=0.5", overrides=["optim.ppo_mini_batch_size=4", *options]
    )
    assert (f"a and recipe {IDENTICAL}" in text) == is_idle


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ("algorithm.ledger.explore=0.5", "algorithm.ledger.enable=true"),
        ("algorithm.filter_groups.metric=score", "algorithm.filter_groups.enable=true"),
        ("algorithm.filter_groups.min_batch_ratio=0.75", "algorithm.filter_groups.on_exhausted=pad"),
        ("reward.overlong_buffer.len=3", "reward.length_shaping=buffer"),
        ("reward.target_length=3", "reward.length_shaping=target"),
    ],
)
def test_an_option_that_nothing_reads_is_told_before_the_first_run(tmp_path: Path, change, needs):
    recipe = write_recipe(tmp_path)
    given = ["reward.overlong_buffer.len=2", "reward.target_length=4", "algorithm.filter_groups.enable=false",
             "algorithm.overlong_filter=true"]  # fmt: skip
    sentence = f"a and recipe {IDENTICAL}: they differ only in {change.partition('=')[0]}, which neither reads"
    assert sentence in found_warnings(recipe, f"a: {change}", overrides=given)
    assert IDENTICAL not in found_warnings(recipe, f"a: {change}", overrides=[*given, needs])
    assert IDENTICAL not in found_warnings(recipe, f"a: {change} {needs}", overrides=given)


WHOLE_ROUNDS = ["algorithm.filter_groups.enable=false", "data.gen_batch_size=4"]  # of one batch, which all groups enter


@pytest.mark.parametrize(
    ("change", "is_read_with"),
    [
        ("algorithm.max_staleness=3", "algorithm.filter_groups.enable=true"),
        ("algorithm.max_staleness=3", "algorithm.overlong_filter=true"),
        ("algorithm.max_staleness=3", "data.gen_batch_size=6"),
        ("algorithm.max_staleness=3", "rollout.mode=inflight"),
        ("algorithm.filter_groups.max_num_gen_batches=3", "algorithm.filter_groups.enable=true"),
        ("algorithm.filter_groups.max_num_gen_batches=3", "algorithm.overlong_filter=true"),
        ("algorithm.filter_groups.max_num_gen_batches=1", "data.gen_batch_size=2"),  # two of four
        ("algorithm.filter_groups.max_num_gen_batches=3", "rollout.mode=inflight"),
        ("algorithm.filter_groups.on_exhausted=raise", "algorithm.filter_groups.enable=true"),
        ("environment.max_turns=2", "environment.use=guess"),
    ],
)
def test_an_option_without_effect_where_no_group_is_replaced_is_told(tmp_path: Path, change, is_read_with):
    recipe, option = write_recipe(tmp_path), change.partition("=")[0]
    sentence = f"a and recipe {IDENTICAL}: they differ only in {option}, which neither reads"
    assert sentence in found_warnings(recipe, f"a: {change}", overrides=WHOLE_ROUNDS)
    acting = [*(each for each in WHOLE_ROUNDS if each.partition("=")[0] not in is_read_with), is_read_with]
    assert IDENTICAL not in found_warnings(recipe, f"a: {change}", overrides=acting)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ("optim.ppo_mini_batch_size=4", "optim.ppo_mini_batch_size=3"),  # 0 is the batch of 4
        ("data.gen_batch_size=4", "data.gen_batch_size=6"),
        ("algorithm.importance_correction=none", "algorithm.importance_correction=sequence-masked"),
    ],
)
def test_values_that_mean_the_same_are_told(tmp_path: Path, change, other):
    recipe, option = write_recipe(tmp_path), change.partition("=")[0]
    given = ["optim.ppo_mini_batch_size=0", "data.gen_batch_size=0", "algorithm.max_staleness=0"]
    sentence = f"a and recipe {IDENTICAL}: they differ only in {option}, whose values mean the same here"
    assert sentence in found_warnings(recipe, f"a: {change}", overrides=given)
    assert sentence not in found_warnings(recipe, f"a: {other}", overrides=given)


def test_losses_of_two_names_and_one_function_are_told(tmp_path: Path):
    recipe, arm = write_recipe(tmp_path), "a: algorithm.loss=grpo"
    given = ["algorithm.clip_ratio_high=0.2", "algorithm.clip_ratio_c=null"]
    grpo = [*given, "algorithm.loss_agg_mode=seq-mean-token-mean"]
    sentence = f"a and recipe {IDENTICAL}: they differ only in algorithm.loss, whose values mean the same here"
    assert sentence in found_warnings(recipe, arm, overrides=grpo)
    assert IDENTICAL not in found_warnings(recipe, arm, overrides=given)


def test_options_of_adapters_without_adapters_are_told(tmp_path: Path):
    recipe, arm = write_recipe(tmp_path), "a: model.lora.alpha=7"
    sentence = f"a and recipe {IDENTICAL}: they differ only in model.lora.alpha, which neither reads"
    assert sentence in found_warnings(recipe, arm)
    assert IDENTICAL not in found_warnings(recipe, arm, overrides=["model.lora.rank=2"])


def test_a_batch_as_round_differs_from_rounds_that_follow_the_keep_rate(tmp_path: Path):
    given = ["data.gen_batch_size=0", "algorithm.max_staleness=1"]
    assert IDENTICAL not in found_warnings(write_recipe(tmp_path), "a: data.gen_batch_size=4", overrides=given)


def test_arms_that_differ_only_in_rounding_are_told(tmp_path: Path):
    recipe = write_recipe(tmp_path, algorithm={"max_staleness": 0})
    costs = ["algorithm.max_logprob_gap=0.5", "cluster.timeout=60", "optim.max_tokens_per_micro_batch=64"]
    for change in costs:
        sentence = f"a and recipe {IDENTICAL} up to rounding: they differ only in {change.partition('=')[0]}, with an"
        assert sentence in found_warnings(recipe, f"a: {change}")
    mixed = "a: cluster.timeout=60 optim.ppo_mini_batch_size=4 algorithm.ledger.explore=0.5"
    assert (
        "up to rounding: they differ only in algorithm.ledger.explore, which neither reads; and in cluster.timeout, "
        "with an effect only on memory, speed or safety; and in optim.ppo_mini_batch_size, whose values mean the same"
    ) in found_warnings(recipe, mixed, overrides=["optim.ppo_mini_batch_size=0"])
    assert IDENTICAL not in found_warnings(recipe, "a: cluster.timeout=60 optim.lr=0.1")
    one = ["optim.ppo_mini_batch_size=4"]
    clip = found_warnings(recipe, "a: algorithm.clip_ratio_high=0.5 cluster.timeout=60", overrides=one)
    assert f"a and recipe {IDENTICAL} up to rounding: only the clip differs" in clip


@pytest.mark.parametrize("correction", ["token-truncated", "sequence-masked"])
def test_a_correction_without_anything_to_correct_is_told(tmp_path: Path, correction):
    recipe, arm = write_recipe(tmp_path), f"a: algorithm.importance_correction={correction}"
    fresh, sentence = ["algorithm.max_staleness=0"], f"a and recipe {IDENTICAL} up to rounding: they differ only in"
    assert sentence in found_warnings(recipe, arm, overrides=fresh)  # also with two updates per batch
    assert IDENTICAL not in found_warnings(recipe, arm)  # groups are carried over
    assert IDENTICAL not in found_warnings(recipe, arm, overrides=["rollout.mode=inflight"])
    sampler = [*fresh, *VLLM, "algorithm.importance_correction=none"]
    assert IDENTICAL not in found_warnings(recipe, arm, overrides=sampler)


def test_losses_that_have_the_same_gradient_are_told_before_the_first_run(tmp_path: Path):
    recipe = write_recipe(tmp_path, algorithm={"max_staleness": 0})
    losses = [f"{name}: algorithm.loss={name}" for name in ("gspo", "sapo", "cispo", "dr_grpo")]
    one = ["optim.ppo_mini_batch_size=4"]
    text = found_warnings(recipe, "symmetric: algorithm.loss=grpo", *losses, overrides=one)
    told = [line.partition(f" {IDENTICAL}")[0] for line in text.splitlines() if "these losses have the same" in line]
    assert told == ["symmetric and gspo", "symmetric and sapo", "gspo and sapo", "cispo and recipe"]
    assert IDENTICAL not in found_warnings(recipe, *losses)  # two updates per batch
    (tmp_path / "mine.py").write_text("def loss(*tensors): ...", encoding="utf-8")
    own = f"own: algorithm.loss={tmp_path / 'mine.py'}:loss"
    assert IDENTICAL not in found_warnings(recipe, own, overrides=one)  # nothing is known about it


def test_arms_that_are_the_same_and_curves_of_two_points_are_told(tmp_path: Path):
    recipe = write_recipe(tmp_path, eval={"every": 0})
    text = found_warnings(recipe, "same: optim.lr=0.001")
    assert "same and recipe have the same options" in text
    assert "eval.every is 0" in text
    assert "with one seed" in text
    assert "with one seed" not in found_warnings(recipe, "a: optim.lr=0.1", seeds=2)


@pytest.mark.parametrize(
    ("option", "paper", "arms"),
    [
        ("algorithm.loss_agg_mode=seq-mean-token-sum", "token-mean", "arms '+token-loss', 'full': "),
        ("algorithm.adv_norm=none", "std", ""),  # of all arms
        ("algorithm.kl_loss_coef=0.1", "0.0", ""),
        ("reward.length_shaping=target", "buffer", "arms '+soft-overlong', '+token-loss', 'full': "),
        ("algorithm.filter_groups.function=mine.py:keep", "null", "arm 'full': "),
    ],
)
def test_a_published_arm_that_is_not_as_in_the_paper_is_told(tmp_path: Path, option: str, paper: str, arms: str):
    recipe, name, given = write_recipe(tmp_path), "the published arm", ["reward.target_length=4", option]
    found = [line for line in warnings(plan_of(recipe, families=["ladder"], overrides=given)) if name in line]
    key, _, value = option.partition("=")
    assert found == [f"{arms}{key} is {value}, as in the recipe; the published arm of this name has {paper}"]
    assert name not in found_warnings(recipe, families=["ladder", "leave-one-out"])
    assert name not in found_warnings(recipe, "a: optim.lr=0.1", overrides=given)


@pytest.mark.parametrize(("seeds", "needed"), [(2, "63.7"), (3, "9.9")])
def test_few_seeds_are_told_with_what_a_verdict_needs(tmp_path: Path, seeds: int, needed: str):
    recipe = write_recipe(tmp_path)
    assert (
        f"with {seeds} seeds and 5 comparisons, no arm is called better or worse unless the clearest difference is "
        f"more than {needed} times its standard error; with --seeds 5 it is 4.6 times"
    ) in found_warnings(recipe, families=["ladder"], seeds=seeds)
    assert f"with {seeds} seeds and 1 comparison, no arm" in found_warnings(recipe, "a: optim.lr=0.1", seeds=seeds)


def test_seeds_that_can_show_something_are_not_warned_of(tmp_path: Path):
    assert "standard error" not in found_warnings(write_recipe(tmp_path), "a: optim.lr=0.1", seeds=4)
    one = "with one seed, no arm is called better or worse: the intervals cover the choice of questions"
    assert one in found_warnings(write_recipe(tmp_path), "a: optim.lr=0.1", seeds=1)


@pytest.mark.parametrize(
    ("arm", "named"),
    [
        ("reward.use=exact", "reward.use"),
        ("data.max_response_length=5", "data.max_response_length"),
        ("rollout.stop='[x]' reward.timeout=3", "reward.timeout, rollout.stop"),
        ("environment.use=guess environment.max_turns=2", "environment.max_turns, environment.use"),
        ("environment.max_turns=2", None),  # there is no environment
        ("reward.length_shaping=buffer reward.overlong_buffer.len=2", None),  # acts on rewards, not on scores
        ("rollout.temperature=0.7", None),  # evaluations have eval.temperature
    ],
)
def test_arms_that_are_evaluated_in_another_way_are_told(tmp_path: Path, arm: str, named: str | None):
    text = found_warnings(write_recipe(tmp_path), f"other: {arm}")
    if named is None:
        assert "evaluated differently" not in text
    else:
        assert f"other is evaluated differently from recipe ({named}), so a difference between them mixes" in text
