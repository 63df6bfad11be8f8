"""Test the arguments of Trainer: all ways to give options are equal, and a mistake is the command line's sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo
from dapo.config import Config, option_names
from dapo.errors import CheckpointError, ConfigError, DapoError, PartError, RewardError
from dapo.training.arguments import Arguments, resolve
from tests import runs

ROWS = [{"prompt": "one", "answer": 1}]
ITSELF: dict = {}
ITSELF["x"] = ITSELF


def reward(completion, answer):
    return 1.0


def resolved(
    config=None, reward_funcs=None, model=None, train=None, held_out=None, resume=False, **sections
) -> Arguments:
    return resolve(config, reward_funcs, model, train, held_out, sections, resume=resume)


def test_all_ways_to_give_options_are_equal(tmp_path):
    nested = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "optim": {"lr": 1e-5, "betas": (0.9, 0.95)}}
    dotted = {"model.path": "m", "data.train": ["t.jsonl"], "optim.lr": np.float64(1e-5), "optim.betas": [0.9, 0.95]}
    expected = Config.parse(nested)
    assert resolved(expected).config is expected
    ways = [
        resolved(nested),
        resolved(dotted),
        resolved({"model.path": "m", "data": {"train": "t.jsonl"}, "optim.lr": 1e-5}, optim={"betas": (0.9, 0.95)}),
        resolved(model=Path("m"), train="t.jsonl", optim=expected.optim),
        resolved(expected, model="m"),
    ]
    assert [way.config for way in ways] == [expected] * len(ways)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(expected.to_yaml().replace("name: run", "name: other"))
    found = resolved(recipe, run={"name": "run"})
    assert (found.config, found.recipe, found.names_run) == (expected, "mine", True)


def test_named_arguments_replace_the_options_of_a_recipe_and_nothing_else(tmp_path):
    recipe = runs.recipe(tmp_path, eval={"k": 2, "data": "held_out.jsonl"})
    whole = Config.load(recipe)
    found = resolved(recipe, model="other", train=ROWS, optim={"lr": 0.5})
    differences = whole.differences(found.config)
    assert {key: now for key, (_, now) in differences.items() if key != "data.train"} == {
        "model.path": "other",
        "optim.lr": 0.5,
    }
    assert found.config.data.train[0].path == "python:train_dataset"
    assert found.rows == {"python:train_dataset": ROWS}
    assert not found.names_run, "only a given run.name stops a second run from taking the next name"
    same = resolved(whole, train=ROWS)
    assert same.names_run
    assert whole.differences(same.config).keys() == {"data.train"}


def test_evaluation_rows_are_evaluated_once_each_unless_eval_k_is_given():
    base = {"model.path": "m", "data.train": "t.jsonl"}
    found = resolved(base, held_out=ROWS)
    assert (found.config.eval.k, list(found.config.eval.data or ())) == (1, ["eval_dataset"])
    assert resolved({**base, "eval.k": 0}, held_out=ROWS).config.eval.k == 0
    assert resolved(base, held_out="held_out.jsonl", eval={"k": 4}).config.eval.k == 4
    several = resolved(base, held_out={"easy": ROWS, "hard": iter(ROWS), "file": "hard.jsonl"})
    paths = {name: sources[0].path for name, sources in (several.config.eval.data or {}).items()}
    assert paths == {"easy": "python:eval_dataset['easy']", "hard": "python:eval_dataset['hard']", "file": "hard.jsonl"}
    assert [*several.rows.values()] == [ROWS, ROWS]


def test_rewards_are_functions_names_of_judges_or_both_with_weights():
    def short(completion):
        return 1.0

    base = {"model.path": "m", "data.train": "t.jsonl"}

    def used(rewards):
        return resolved(base, rewards).config.reward.use

    assert used(reward) == "python:reward"
    assert used("math") == "math"
    assert used([reward, short]) == {"python:reward": 1.0, "python:short": 1.0}
    assert used({"math": 1, short: 0.2}) == {"math": 1.0, "python:short": 0.2}
    assert used([lambda completion: 0, lambda completion: 1]) == {"python:<lambda>": 1.0, "python:<lambda> 2": 1.0}
    assert resolved(base, reward_funcs=None).config.reward.use == "auto"


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("rollout.m=3", {"rollout": {"m": 3}}),
        ("optm.lr=3", {"optm.lr": 3}),
        ("rollout.n=one", {"rollout.n": "one"}),
        ("rollout.n=1", {"rollout": {"n": 1}}),
        ("reward.length_shaping=buffer", {"reward.length_shaping": "buffer"}),
        ("run.name='a/b'", {"run.name": "a/b"}),
        ("eval.best_metric=x", {"eval": {"best_metric": "x"}}),
    ],
)
def test_a_mistake_in_options_gets_the_sentence_of_the_command_line(tmp_path, override, options):
    recipe = runs.recipe(tmp_path)
    with pytest.raises(ConfigError) as of_command:
        Config.load(recipe, [override])
    with pytest.raises(ConfigError) as of_python:
        resolved({**yaml.safe_load(recipe.read_text()), **options})
    command, python = (str(found.value).partition(": ")[2] for found in (of_command, of_python))
    assert python == command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, r"model.path is missing; give model=..., or model.path in config"),
        ({"model": "m"}, r"data.train is missing; give train_dataset=..., or data.train in config"),
        (
            {"config": "Qwen/Qwen3-0.6B"},
            r"'Qwen/Qwen3-0.6B', which is not a recipe; to name a model, write model='Qwen",
        ),
        ({"config": "none.yaml"}, r"none.yaml: cannot be read \(No such file"),
        ({"config": 3}, r"config is a int; expected a Config, a mapping of options, or the path of a recipe"),
        ({"config": {3: 4}}, r"config: 3 is not the name of an option"),
        ({"config": {"rollout": 3, "rollout.n": 4}}, r"config: 'rollout' is a value, not a section"),
        ({"config": {"rollout.vllm": {"x": object()}}, "model": "m", "train": "t"}, r"config: holds a value that YAML"),
        ({"config": {"data.prompt_template": "a\0b"}, "model": "m", "train": "t"}, r"config: .*NUL|config: .*special"),
        ({"model": object()}, r"model is a object; expected a hub id or a folder: save the model there"),
        ({"train_datset": ROWS}, r"Trainer has no argument 'train_datset'; did you mean 'train_dataset'\?"),
        ({"zzz": 1}, r"Trainer has no argument 'zzz'; the sections of options are run, model, data"),
        ({"config": {"rollout.vllm": ITSELF}}, r"config: an option holds a value that contains itself"),
        ({"optim": 3}, r"Trainer: optim is 3; expected options, such as"),
        ({"args": object()}, r"no argument 'args'; give options as config=.*`dapo convert` turns a GRPOConfig"),
        ({"peft_config": object()}, r"no argument 'peft_config'; give LoRA as model="),
        ({"num_generations": 4}, r"no argument 'num_generations'; as an option of TRL, in dapo it is 'rollout.n'"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolved(**arguments)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([], r"the list of reward functions is empty"),
        (3, r"the reward is 3; expected a function"),
        ([3], r"the list of rewards has a int; expected a function, or auto, math"),
        ([{"score": 1.0}], r"the list of rewards has a dict; expected a function, or auto, math"),
        ({reward: "much"}, r"the weight of the reward reward is 'much'; expected a number"),
    ],
)
def test_wrong_rewards_are_one_sentence(rewards, sentence):
    with pytest.raises(RewardError, match=sentence):
        resolved({"model.path": "m", "data.train": "t"}, rewards)


class Odd:
    """A value that no option takes."""


ODD = st.sampled_from(
    [Odd(), Odd, b"\xff", float("nan"), 10**30, "a\0b", "\ud800", np.arange(3), {1: 2}, Path("x"), ...]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*option_names(), *Config.model_fields, "rollout.n.x", "", ".", "x"]) | st.text(max_size=8)


@settings(max_examples=100)
@given(options=st.dictionaries(KEYS, VALUES, max_size=3))
def test_options_of_any_kind_are_a_configuration_or_a_sentence(options):
    with suppress(DapoError):
        assert isinstance(resolved({"model.path": "m", "data.train": "t.jsonl", **options}).config, Config)


def test_a_name_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run to resume; leave out resume=True to start one"):
        resolve({"run": {"dir": str(tmp_path), "name": "rum"}}, None, None, None, None, {}, resume=True)


def test_parts_are_custom_parts():
    with pytest.raises(PartError, match=r"parts is a dict; expected dapo.CustomParts\(loss="):
        resolve({"model.path": "m", "data.train": "t"}, None, None, None, None, {}, {"loss": print}, resume=False)


def test_the_public_names_are_listed_before_they_are_imported():
    assert set(dapo.__all__) <= set(dir(dapo))
