"""Tests of the conversion: every row's value, defaults that differ, the published run, and what cannot be converted."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from dapo.config import Config, leaves
from dapo.config.loading import parse_value
from dapo.config.migration.recipe import Recipe, convert
from dapo.config.migration.sources import Settings, read_settings
from dapo.config.migration.table import find, rows
from dapo.errors import ConfigError
from tests import fuzz

ROOT = Path(__file__).parent.parent.parent.parent
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
NEEDED = {
    "verl": {f"{M}.path": "m", "data.train_files": "d.parquet", "algorithm.adv_estimator": "grpo", f"{R}.n": 4},
    "trl": {"model_name_or_path": "m", "dataset_name": "d.jsonl", "max_steps": 10, "lr_scheduler_type": "constant"},
}


def converted(system: str, given: dict[str, Any]) -> Recipe:
    return convert(Settings(system, {**NEEDED[system], **given}, []))


def loaded(folder: Path, recipe: Recipe) -> Config:
    (folder / "converted.yaml").write_text(recipe.text("run.sh"), encoding="utf-8")
    return Config.load(folder / "converted.yaml")


def value(config: Config, option: str) -> Any:
    found = config.option(option)
    return list(found) if isinstance(found, tuple) and option != "data.train" else found


def read_cases(name: str) -> list[tuple[str, str, str]]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [(system, given, expected) for line in lines[1:] for system, given, expected in [line.split(" | ")]]


def mapping(text: str) -> dict[str, Any]:
    return parse_value(f"{{{text}}}")


CASES = read_cases("converted.txt")


@pytest.mark.parametrize(("system", "given", "expected"), CASES)
def test_a_converted_recipe_loads_with_the_promised_values(tmp_path, system, given, expected):
    recipe = converted(system, mapping(given))
    config = loaded(tmp_path, recipe)
    assert {option: value(config, option) for option in mapping(expected)} == mapping(expected)
    assert not recipe.unknown


@pytest.mark.parametrize("system", ["verl", "trl"])
def test_a_schedule_over_epochs_is_left_out_and_named(tmp_path, system):
    steps = {} if system == "verl" else {"max_steps": -1, "num_train_epochs": 2}
    name = f"{A}.optim.lr_scheduler_type" if system == "verl" else "lr_scheduler_type"
    recipe = converted(system, {name: "cosine", **steps})
    config = loaded(tmp_path, recipe)
    assert config.optim.lr_schedule == "constant"
    assert config.run.epochs is not None
    assert "until then the rate is constant" in recipe.missing[f"{name}=cosine"]


# These have tests of their own.
ELSEWHERE = {
    "data.train_files", "data.val_files", "data.train_max_samples", f"{A}.kl_loss_type",
    "dataset_name", "dataset_test_split", "datasets", "optim", "per_device_train_batch_size",
}  # fmt: skip


@pytest.mark.parametrize("system", ["verl", "trl"])
def test_every_conversion_has_a_case(system):
    found = (find(system, name) for case, given, _ in CASES if case == system for name in mapping(given))
    tried = {row.name for row in found if row is not None}
    needing = {row.name for row in rows(system) if row.conversion.split()[0] not in ("free", "skip", "off")}
    assert needing - tried <= ELSEWHERE | NEEDED[system].keys()


def test_defaults_of_the_other_system_are_written_where_ours_differ(tmp_path):
    config = loaded(tmp_path, converted("verl", {}))
    assert (config.algorithm.clip_ratio_high, config.algorithm.clip_ratio_c) == (0.2, 3.0)
    assert (config.data.train_batch_size, config.optim.ppo_mini_batch_size, config.data.max_response_length) == (
        1024,
        256,
        512,
    )
    assert (config.optim.weight_decay, config.optim.warmup_steps, config.algorithm.filter_groups.enable) == (
        0.01,
        0,
        False,
    )
    assert config.algorithm.max_staleness == 0
    assert "clip_ratio_c: 3.0 # verl's default" in converted("verl", {}).text("run.sh")
    config = loaded(tmp_path, converted("trl", {}))
    assert (config.algorithm.clip_ratio_high, config.algorithm.clip_ratio_c, config.rollout.n) == (0.2, None, 8)
    assert (config.optim.weight_decay, config.optim.warmup_steps, config.run.seed) == (0.0, 0, 42)
    assert (config.data.train_batch_size, config.data.max_response_length) == (1, 512)
    assert not config.algorithm.filter_groups.enable  # TRL has no dynamic sampling


BATCHES = [
    {},
    {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 8},
    {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 6,
        "num_generations": 4,
    },
    {"per_device_train_batch_size": 8, "generation_batch_size": 64, "num_generations": 4},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_generations": 16, "num_iterations": 3},
]


@pytest.mark.parametrize("given", BATCHES)
def test_batches_hold_as_many_responses_as_in_trl_itself(tmp_path, given):
    from trl.trainer.grpo_config import GRPOConfig

    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=60, **given)
    config = loaded(tmp_path, converted("trl", {**given, "max_steps": 60}))
    assert config.data.train_batch_size * config.rollout.n == theirs.generation_batch_size
    updates = theirs.steps_per_generation / theirs.gradient_accumulation_steps * theirs.num_iterations
    assert config.data.train_batch_size / config.mini_batch_size * config.optim.ppo_epochs == updates
    assert config.run.steps == pytest.approx(60 / updates, abs=1)


def test_files_become_sources_and_sets(tmp_path):
    files = {"data.train_files": ["a.parquet", "b.parquet"], "data.val_files": ["gsm8k/test.jsonl", "math/test.jsonl"]}
    config = loaded(tmp_path, converted("verl", files))
    assert [source.path for source in config.data.train] == ["a.parquet", "b.parquet"]
    assert list(config.eval.data or ()) == ["gsm8k-test", "math-test"]
    config = loaded(tmp_path, converted("verl", {"data.train_max_samples": 100}))
    assert (config.data.train[0].path, config.data.train[0].size) == ("d.parquet", 100)
    hub = {"dataset_name": "openai/gsm8k", "dataset_config": "main", "eval_strategy": "steps", "eval_steps": 2}
    config = loaded(tmp_path, converted("trl", hub))
    assert (config.data.train[0].path, config.data.train[0].params) == ("openai/gsm8k", {"name": "main"})
    assert config.eval.data is not None and config.eval.k == 8
    assert config.eval.data["test"][0].params == {"name": "main", "split": "test"}
    config = loaded(tmp_path, converted("trl", {"datasets": [{"path": "a/b"}, {"path": "c/d", "split": "dev"}]}))
    assert [source.params for source in config.data.train] == [{}, {"split": "dev"}]


@pytest.mark.parametrize(("system", "given", "expected"), read_cases("not_converted.txt"))
def test_what_has_no_counterpart_is_listed_with_the_reason_and_the_rest_loads(tmp_path, system, given, expected):
    recipe = converted(system, mapping(given))
    assert expected in " ".join(recipe.report())
    loaded(tmp_path, recipe)


def test_neutral_values_are_not_listed():
    neutral = {f"{R}.top_p": 1.0, f"{R}.top_k": -1, f"{A}.entropy_coeff": 0, f"{A}.strategy": "fsdp2"}
    recipe = converted("verl", {**neutral, "trainer.total_training_steps": 5})
    assert not recipe.missing
    recipe = converted("trl", {"top_p": 1, "top_k": None, "optim": "adamw_torch_fused", "trust_remote_code": False})
    assert not recipe.missing


def test_unneeded_and_unknown_names_are_listed_apart():
    report = "\n".join(converted("verl", {f"{A}.ppo_micro_batch_size_per_gpu": 4, "trainer.zebra": 1}).report())
    assert f"Not needed:\n- algorithm.adv_estimator, {A}.ppo_micro_batch_size_per_gpu" in report
    assert "Not in our list of verl's options, and left out:\n- trainer.zebra" in report


def places(recipe: Recipe, name: str) -> list[str]:
    """Return where a given option of the other system ended."""
    row = find(recipe.settings.system, name)
    if row is not None and name not in row.names and not row.name.endswith(".*"):
        name = row.name  # a key of a mapping that is one option
    lists = {
        "recipe": name in recipe.written,
        "missing": any(key.startswith(f"{name}=") and not key.endswith("(the default)") for key in recipe.missing),
        "differing": name in recipe.differing and name not in recipe.written,
        "unneeded": name in recipe.unneeded,
        "unknown": name in recipe.unknown,
    }
    assert recipe.unneeded.count(name) + recipe.unknown.count(name) <= 1
    return [place for place, is_there in lists.items() if is_there]


VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 8, 64, -1, 0.5, 1.0, "\ufffd", "x-\ufffd", "no", "steps", "epoch", "cosine", "grpo",
    "gspo", "cispo", "sapo", "dapo", "clip_cov", "token-mean", "seq-mean-token-sum-norm", "a.py", "m",
    ["console", "wandb"], ["a.b"], [1.0, 2.0], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("system", ["verl", "trl"])
def test_every_given_option_ends_in_exactly_one_place(system):
    random = Random(5)
    names = [name.replace("*", "x") for row in rows(system) for name in row.names] + ["zebra.stripes"]
    decisive = [row.name for row in rows(system) if row.conversion.split()[0] not in ("free", "off", "same")]
    for _ in range(80):
        chosen = [*random.sample(decisive, 10), *random.sample(names, random.choice([5, 30]))]
        given = {name.replace("*", "x"): random.choice(VALUES) for name in chosen}
        recipe = convert(Settings(system, given, []))
        for name in given:
            assert len(places(recipe, name)) == 1, (name, places(recipe, name), given)
        assert set(recipe.written.values()) <= {row.ours for row in rows(system)}


def test_a_comment_says_whether_a_value_is_a_default_or_comes_from_what_was_given():
    comments = converted("verl", {f"{A}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50}).comments
    assert comments["optim.warmup_steps"] == f"from {A}.optim.lr_warmup_steps_ratio, trainer.total_training_steps"
    assert comments["optim.weight_decay"] == "verl's default"
    comments = converted("trl", {"adam_beta2": 0.95, "loss_type": "grpo"}).comments
    assert comments["optim.betas"] == "from adam_beta2"
    assert comments["algorithm.clip_ratio_high"] == "TRL's default"


def test_weight_decay_of_all_weights_is_a_difference_where_trl_leaves_some_out():
    assert "biases and norms decay, too" in converted("trl", {"weight_decay": 0.1}).differing["weight_decay"]
    for given in ({"weight_decay": 0.0}, {"weight_decay": 0.1, "use_peft": True}):
        assert "weight_decay" not in converted("trl", given).differing


def test_dropout_of_zero_is_no_difference():
    recipe = converted("verl", {f"{M}.override_config.attention_dropout": 0.0, "trainer.total_training_steps": 5})
    assert not recipe.missing


PYTHON = """
from peft import LoraConfig
from my.rewards import short
from trl.rewards import accuracy_reward
G = 8
G2: int = 2 * G
steps = 3
steps += 1
def check(completions, **kwargs): ...
peft = LoraConfig(r=32, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=True)
config = GRPOConfig("out", num_generations=G, per_device_train_batch_size=G2 // 2 + G, max_steps=steps, **extra)
GRPOTrainer(model="m", args=config, reward_funcs=[check, accuracy_reward, short], peft_config=peft, callbacks=[log])
"""


def test_python_is_read_as_far_as_it_is_constant_and_the_rest_is_listed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PYTHON, encoding="utf-8")
    settings = read_settings(path, {})
    recipe = convert(settings)
    assert settings.given["per_device_train_batch_size"] == 16
    assert recipe.options["model.lora.rank"] == 32
    assert recipe.options["model.lora.alpha"] == 8  # PEFT's default
    assert recipe.options["model.lora.target_modules"] == ["q_proj"]
    assert list(recipe.options["reward.use"]) == [f"{path}:check", "math", "my/rewards.py:short"]
    assert recipe.unknown == ["peft_config.use_dora"]
    assert "max_steps=?" in recipe.missing
    report = "\n".join(recipe.report())
    assert "GRPOConfig in line 11 has arguments that could not be read: 'out', **extra" in report
    assert "the argument callbacks of GRPOTrainer in line 12 is not converted" in report
    assert f"reward.use points at {path}: dapo imports that file" in report


def test_adapters_that_cannot_be_read_are_listed(tmp_path):
    (tmp_path / "a.py").write_text("GRPOTrainer(model='m', peft_config=make())", encoding="utf-8")
    assert "peft_config=?" in convert(read_settings(tmp_path / "a.py", {})).missing


def test_a_recipe_without_model_or_data_says_what_is_missing():
    recipe = convert(Settings("verl", {"algorithm.adv_estimator": "grpo"}, []))
    assert recipe.problem() == "'model' is missing; 'data.train' is missing"
    assert "# It does not load yet: 'model' is missing; 'data.train' is missing." in recipe.text("x.sh")


def test_of_several_spellings_the_first_that_is_not_null_counts():
    given = {"reward.custom_reward_function.path": "new.py", "custom_reward_function.path": None}
    assert converted("verl", given).options["reward.use"] == "new.py:compute_score"
    given = {f"{M}.lora.alpha": 32, f"{M}.lora_alpha": 16}
    assert converted("verl", given).options["model.lora.alpha"] == 16


def test_differences_are_told_only_where_the_run_is_not_the_same():
    told = converted("trl", {"beta": 0.0, "loss_type": "dapo", "use_vllm": True}).differing
    assert list(told) == ["max_steps", "use_vllm"]
    told = converted("trl", {"beta": 0.1, "loss_type": "grpo"}).differing
    assert set(told) == {"max_steps", "beta", "loss_type"}


# The settings of the published run, written as the launch scripts of verl write theirs.
PUBLISHED = r"""
set -euo pipefail
name='published'
prompt_tokens=$((1024 * 2))
buffer_tokens=$((1024 * 4))
response_tokens=$((16384 + buffer_tokens))
prompts=512
ROOT=${ROOT:-"${HOME}/data"}
OPTIMIZER=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0
)
ray job submit --no-wait --runtime-env="${RUNTIME_ENV:-env.yaml}" -- python3 -m recipe.dapo.main_dapo \
    "${OPTIMIZER[@]}" \
    data.train_files="${TRAIN_FILE:-"${ROOT}/dapo-math-17k.parquet"}" data.val_files="${ROOT}/aime-2024.parquet" \
    data.truncation='left' data.max_prompt_length=${prompt_tokens} data.max_response_length=${response_tokens} \
    data.train_batch_size=${prompts} data.gen_batch_size=$((prompts * 3)) \
    actor_rollout_ref.model.path="${MODEL_PATH:-Qwen/Qwen2.5-32B}" \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \
    actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_k=-1 \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((prompt_tokens + response_tokens)) \
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=${buffer_tokens} reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.experiment_name="${name}" trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-16}" \
    trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1
"""


def test_the_published_settings_give_the_published_recipe_but_for_names_and_places(tmp_path):
    (tmp_path / "run.sh").write_text(PUBLISHED, encoding="utf-8")
    recipe = convert(read_settings(tmp_path / "run.sh", {}))
    config = loaded(tmp_path, recipe)
    ours = Config.load(ROOT / "recipes" / "dapo_qwen2.5_32b.yaml")
    different = {option for option, _ in leaves() if value(config, option) != value(ours, option)}
    assert different == {
        "run.name", "run.trackers", "data.train", "eval.data", "eval.best_metric",
        "run.steps", "run.epochs",  # epochs there
        "eval.k",  # each question is 32 times in the file there
    }  # fmt: skip
    assert not recipe.missing
    assert not recipe.unknown


@pytest.mark.parametrize(
    ("name", "text", "system", "expected"),
    [
        ("a.yaml", "actor_rollout_ref: {rollout: {n: 6}}\ndata: {train_files: x}\n", "verl",
         {f"{R}.n": 6, "data.train_files": "x"}),
        ("a.yml", "num_generations: 6\nreward_weights: null\n", "trl", {"num_generations": 6, "reward_weights": None}),
        ("a.json", json.dumps({"num_generations": 6, "beta": 0.1}), "trl", {"num_generations": 6, "beta": 0.1}),
        ("a.yaml", "trainer: {nnodes: 2, project_name: '${trainer.nnodes}-p', save_freq: '${oc.select:a.b,3}'}", "verl",
         {"trainer.nnodes": 2, "trainer.project_name": "2-p", "trainer.save_freq": 3}),
        ("a.yaml", "trainer: {_target_: x, nnodes: '???', device: '${oc.env:D}', save_freq: '${trainer.save_freq}'}",
         "verl",
         {"trainer.device": "\ufffd", "trainer.save_freq": "\ufffd"}),
        ("a.py", "N = 6\nconfig = GRPOConfig(num_generations=N, output_dir='o', beta=f(3))\n"
                 "GRPOTrainer(model='m', args=config, reward_funcs=[check])", "trl",
         {"num_generations": 6, "output_dir": "o", "beta": "\ufffd", "model_name_or_path": "m"}),
        ("a", "python3 -m verl.trainer.main_ppo a.lr=1e-6 x.y=null trainer.logger=['console','wandb']", "verl",
         {"a.lr": 1e-6, "x.y": None, "trainer.logger": ["console", "wandb"]}),
    ],
)  # fmt: skip
def test_scripts_trees_and_python_files_are_read(tmp_path, name, text, system, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    settings = read_settings(tmp_path / name, {})
    assert settings.system == system
    assert {key: found for key, found in settings.given.items() if key != "reward_funcs"} == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gone.sh", None, "cannot be read (No such file or directory)"),
        ("a.yaml", "a: [", "not valid YAML (line 1, column 5: "),
        ("a.yaml", "[]", "expected options of verl or TRL, found list"),
        ("a.yaml", "zebra: 1", "found no option of verl or TRL; expected names such as"),
        ("a.yaml", "model: {path: m}\noptim: {lr: 1}", "these are options of dapo already; `dapo train "),
        ("a.py", "x = (", "not valid Python (line 1)"),
        ("a.py", "print('hello')", "found no call of GRPOConfig with named arguments"),
        ("a.sh", "\udcff", "not valid shell script (it is not a text file in UTF-8)"),
        ("a.sh", "x" * 300_000, "longer than 262,144 characters"),
        ("a.sh", 'a="${b:-' * 3000 + '}"' * 3000, "quotes and brackets are nested too deeply"),
        ("a.sh", "ls", "found no call of verl; expected a line such as"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_in_one_sentence(tmp_path, name, text, expected):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_settings(path, {})
    assert str(caught.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(caught.value)


def test_damaged_input_gives_a_sentence_or_a_recipe_that_is_valid_yaml(tmp_path):
    random = Random(3)
    names = [name for system in ("verl", "trl") for row in rows(system) for name in row.names]
    for attempt in range(80):
        if attempt % 2:
            text, path = PUBLISHED, tmp_path / "damaged.sh"
            for _ in range(random.randint(1, 6)):
                place = random.randrange(len(text))
                damage = random.choice(["", "'", '"', "$", "{", "}", "(", ")", "\\", "\n", "=", "\0", "é"])
                text = text[:place] + damage + text[place + 1 :]
        else:
            chosen = {random.choice(names): random.choice(fuzz.SCALARS) for _ in range(6)}
            text, path = (
                "".join(f"{json.dumps(name)}: {scalar}\n" for name, scalar in chosen.items()),
                tmp_path / "a.yaml",
            )
        path.write_text(text, encoding="utf-8")

        def attempt_to_convert(path: Path = path) -> None:
            written = convert(read_settings(path, {})).text(path.name)
            assert isinstance(yaml.safe_load(written), dict), written

        fuzz.survives(attempt_to_convert)
