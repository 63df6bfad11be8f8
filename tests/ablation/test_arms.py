"""The arms of an ablation: what the published ones change on a recipe, and how own ones are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.ablation.arms import collect_arms
from dapo.config import Config
from dapo.config.training_options import LOSS_SETTINGS
from dapo.errors import ConfigError

MINIMAL = "model: {path: model}\ndata: {train: train.jsonl, max_response_length: 100}\n"


def config(*overrides: str) -> Config:
    return Config.from_text(MINIMAL, "recipe", overrides)


def resolved(base: Config, *families: str) -> dict[str, Config]:
    arms, _ = collect_arms(base, families, ())
    return {arm.name: Config.from_text(base.to_yaml(), arm.name, arm.overrides) for arm in arms}


def techniques(found: Config) -> tuple[bool, float, str, str, bool]:
    a = found.algorithm
    shaping = found.reward.length_shaping
    return a.overlong_filter, a.clip_ratio_high, shaping, a.loss_agg_mode, a.filter_groups.enable


def test_the_ladder_adds_one_technique_after_the_other_in_the_papers_order():
    found = {name: techniques(each) for name, each in resolved(config(), "ladder").items()}
    assert found == {
        "grpo": (False, 0.2, "none", "seq-mean-token-mean", False),
        "+overlong-filter": (True, 0.2, "none", "seq-mean-token-mean", False),
        "+clip-higher": (True, 0.28, "none", "seq-mean-token-mean", False),
        "+soft-overlong": (True, 0.28, "buffer", "seq-mean-token-mean", False),
        "+token-loss": (True, 0.28, "buffer", "token-mean", False),
        "full": (True, 0.28, "buffer", "token-mean", True),
    }
    assert resolved(config(), "ladder")["full"].reward.overlong_buffer.len == 20  # a fifth, as published


def test_leave_one_out_takes_one_technique_away_from_all():
    found = {name: techniques(each) for name, each in resolved(config(), "leave-one-out").items()}
    full = found.pop("full")
    changed = {name: [i for i in range(5) if each[i] != full[i]] for name, each in found.items()}
    names = ["overlong-filter", "clip-higher", "soft-overlong", "token-loss", "dynamic-sampling"]
    assert changed == {f"no-{name}": [i] for i, name in enumerate(names)}


def test_a_technique_that_the_recipe_has_keeps_the_recipes_values():
    base = config(
        "algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.4", "reward.length_shaping=buffer",
        "reward.overlong_buffer.len=30", "algorithm.loss_agg_mode=seq-mean-token-sum", "algorithm.ledger.enable=true",
        "algorithm.ledger.revisit=0.5", "data.gen_batch_size=128",
    )  # fmt: skip
    found = resolved(base, "ladder")
    grpo, full = found["grpo"], found["full"]
    assert techniques(grpo) == (False, 0.1, "none", "seq-mean-token-mean", False)
    assert techniques(full) == (True, 0.4, "buffer", "seq-mean-token-sum", True)
    assert full.reward.overlong_buffer.len == 30
    assert (full.algorithm.ledger, full.gen_batch_size) == (base.algorithm.ledger, 128)
    assert not grpo.algorithm.ledger.enable
    assert grpo.gen_batch_size == grpo.data.train_batch_size
    assert grpo.algorithm.filter_groups.max_num_gen_batches == 1


def test_in_flight_an_arm_without_dynamic_sampling_keeps_the_recipes_limit_of_batches():
    base = config("rollout.mode=inflight", "algorithm.filter_groups.max_num_gen_batches=7")
    for arm in ("grpo", "+token-loss"):
        found = resolved(base, "ladder")[arm].algorithm.filter_groups
        assert (found.enable, found.max_num_gen_batches) == (False, 7)


def test_without_dynamic_sampling_nothing_chooses_prompts():
    base = config("algorithm.ledger={enable: true, explore: 0.1, revisit: 0.3, lookahead: 3}")
    found = resolved(base, "leave-one-out")
    ledger = found["no-dynamic-sampling"].algorithm.ledger
    assert (ledger.enable, ledger.revisit, ledger.lookahead) == (False, 0.0, 1)
    assert found["no-clip-higher"].algorithm.ledger == base.algorithm.ledger


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.3, 0.38)])
def test_clip_higher_is_higher_than_the_recipes_own_clip(low, high):
    found = resolved(config(f"algorithm.clip_ratio_low={low}", f"algorithm.clip_ratio_high={low}"), "ladder")
    assert found["full"].algorithm.clip_ratio_high == high
    assert found["+overlong-filter"].algorithm.clip_ratio_high == low


def test_an_arm_that_a_family_already_has_may_be_named_again():
    arms, _ = collect_arms(config(), ["ladder"], ["grpo"])
    assert [arm.name for arm in arms] == list(resolved(config(), "ladder"))


def test_both_families_together_have_every_distinct_arm_once():
    names = list(resolved(config(), "ladder", "leave-one-out"))
    assert len(names) == 6 + 4  # full is shared, and no-dynamic-sampling is +token-loss
    assert "no-dynamic-sampling" not in names


def test_own_arms_are_compared_with_the_recipe(tmp_path: Path):
    file = tmp_path / "arms.yaml"
    file.write_text("hot: {optim.lr: 1e-3}\nodd: {rollout: {n: 4}, optim: {lr_schedule: linear}}\n", encoding="utf-8")
    arms, reference = collect_arms(config(), [str(file)], ["big: data.train_batch_size=64  rollout.stop='[a b]'"])
    assert reference == "recipe"
    assert {arm.name: arm.overrides for arm in arms} == {
        "hot": ("optim.lr=0.001",),
        "odd": ("rollout.n=4", "optim.lr_schedule=linear"),
        "big": ("data.train_batch_size=64", "rollout.stop=[a b]"),
        "recipe": (),
    }


@pytest.mark.parametrize("times", [1, 2])
def test_a_published_arm_can_be_named_alone_and_again(times):
    arms, reference = collect_arms(config(), (), ["no-dynamic-sampling"] * times)
    assert ([arm.name for arm in arms], reference) == (["no-dynamic-sampling", "full"], "full")


@pytest.mark.parametrize(
    ("families", "given", "sentence"),
    [
        (["laddr"], [], r"--arms 'laddr': is neither ladder, .* did you mean 'ladder'"),
        ([], ["optim.lr=1e-5"], r"--arm 'optim.lr=1e-5': expected 'NAME: KEY=VALUE ...'.* one of grpo, .*full"),
        ([], ["a: optim.lr=1e-5", "a: optim.lr=2e-5"], "arm 'a': two arms have this name"),
        ([], ["a: optim.lr=1e-5", "A: optim.lr=2e-5"], "arm 'a': differs from 'A' only in case, and some disks would"),
        ([], ["Recipe: optim.lr=1e-5"], "arm 'Recipe': differs from 'recipe' only in case"),
        ([], ["a: optim.lr=1e-5 optim.lr=2e-5"], "arm 'a': optim.lr is given twice; give it one value"),
        ([], ["gpro"], r"did you mean 'grpo'\?$"),
        ([], ["full: optim.lr=1e-5"], "arm 'full': a published arm has this name"),
        ([], ["x/y: optim.lr=1e-5"], "arm 'x/y': the name becomes that of a folder"),
        ([], ["\udcff: optim.lr=1e-5"], r"arm '\\udcff': the name is not valid UTF-8; choose another name"),
        ([], ["a: eval.k=3"], "arm 'a': eval.k is the same for all arms"),
        ([], ["a: run.seed=3"], "arm 'a': run.seed is the same for all arms"),
        ([], ["a: rollout.stop='[x"], "cannot be split into options"),
        ([], ["recipe: "], "there is only one arm, 'recipe'"),
        ([], ["recipe: optim.lr=1e-5", "b: optim.lr=2e-5"], "arm 'recipe': this is the name of the unchanged recipe"),
        ([], [f"{'x' * 300}: optim.lr=1e-5"], r"arm 'x{40}\.\.\.': .* has 300 bytes; choose one of at most 200"),
        ([], ["a: data.prompt_template=dapo"], "arm 'a': data.prompt_template is the same for all arms"),
        ([], ["a: data.system_prompt=brief"], "arm 'a': data.system_prompt is the same for all arms"),
        ([], ["a: data.columns.prompt=question"], "arm 'a': data.columns.prompt is the same for all arms"),
        ([], ["a: 'eval={k: 3}'"], "arm 'a': eval is the same for all arms"),
        ([], ["a: 'run={seed: 3}'"], "arm 'a': run is the same for all arms"),
        ([], ["a: 'algorithm={loss: gspo}'"], "arm 'a': algorithm is a section; give its options .* algorithm.loss="),
        ([], ["a: 'algorithm.ledger={enable: true}'"], "algorithm.ledger is a section.* algorithm.ledger.enable=..."),
        (
            [],
            ["a: data.train={path: x, size: 4}"],
            r"'x,' is not KEY=VALUE; put quotes around a value .*train=\"\{path",
        ),
    ],
)
def test_arms_that_make_no_sense_are_refused_in_one_sentence(families, given, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        collect_arms(config(), families, given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hot: 3", "arm 'hot' is 3; expected options"),
        ("", r"arms\.yaml: expected arms such as `hot: \{optim.lr: 1e-5\}`, found nothing"),
        ("[optim.lr, 1]", r"arms\.yaml: expected arms such as .*, found a list"),
        ("hot: {optim.lr: 1e-3, optim: {lr: 1e-4}}", "arm 'hot': optim.lr is given twice; give it one value"),
        ("hot: {optim: 3}", "arm 'hot': optim is a section; give its options one by one"),
    ],
)
def test_a_file_that_holds_no_arms_is_refused(tmp_path: Path, text, sentence):
    file = tmp_path / "arms.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        collect_arms(config(), [str(file)], ())


def test_the_ladder_refuses_a_recipe_with_another_loss():
    with pytest.raises(ConfigError, match=r"the recipe has gspo; name your own arms with --arm"):
        collect_arms(config("algorithm.loss=gspo"), ["ladder"], ())


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL + "algorithm: {clip_ratio_high: 0.3, loss_agg_mode: token-mean}",
        MINIMAL + "algorithm: {loss: dr_grpo}",
        MINIMAL + "algorithm: {loss: gspo, clip_ratio_low: 0.1}",
        config().to_yaml(),  # every option is given
    ],
)
def test_an_arm_with_another_loss_has_the_options_of_that_loss_and_not_the_recipes(text):
    base = Config.from_text(text, "recipe")
    for loss in LOSS_SETTINGS.keys() - {base.algorithm.loss}:
        (arm, _), _ = collect_arms(base, (), [f"other: algorithm.loss={loss}"])
        found = Config.from_text(text, "recipe", arm.overrides).algorithm
        expected = config(f"algorithm.loss={loss}").algorithm
        for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "adv_norm"):
            assert getattr(found, name) == getattr(expected, name), (loss, name)


def test_an_arm_with_another_loss_keeps_the_options_that_it_gives_itself():
    base = config("algorithm.clip_ratio_low=0.2", "algorithm.clip_ratio_high=0.28")
    (arm, _), _ = collect_arms(base, (), ["wide: algorithm.loss=gspo algorithm.clip_ratio_high=0.01"])
    assert arm.overrides == ("algorithm.loss=gspo", "algorithm.clip_ratio_high=0.01", "algorithm.clip_ratio_low=0.0003")
