"""Tests of the tables of verl's and TRL's options: they are true, complete, and answer in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dapo.config import Config, option_names
from dapo.config.migration import trl, verl
from dapo.config.migration.pages import MARKER, table_markdown
from dapo.config.migration.table import NOT_SET, SYSTEMS, find, rows
from dapo.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent.parent
ALL = [row for system in SYSTEMS for row in rows(system)]
CONVERSIONS = {"verl": verl.CONVERSIONS, "trl": trl.CONVERSIONS}
SMALLEST = "model: {path: m}\ndata: {train: d.jsonl}\n"


def test_the_tables_hold_the_well_known_names_once():
    for system, least in (("verl", 60), ("trl", 40)):
        names = [name for row in rows(system) for name in row.names]
        assert len(names) == len(set(names))
        assert sum(row.ours is not None for row in rows(system)) >= least


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_leads_to_an_option_of_ours_and_a_conversion_that_exist(system):
    named = {"free"} | {row.conversion for row in rows(system) if not row.conversion.startswith("off ")}
    assert named - {"free"} == set(CONVERSIONS[system]), "a conversion is missing, or nothing uses it"
    assert {row.ours for row in rows(system)} - {None} <= set(option_names())


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_every_note_is_one_sentence(row):
    assert row.note.endswith(".")
    assert ". " not in row.note.replace("Dr. ", "") and "  " not in row.note and "|" not in row.note
    assert len(row.note) < 200


# Read by `trl grpo --config`, but given to accelerate, or gone from TRL 1.16.
NOT_IN_TRL = {
    "num_processes", "accelerate_config", "max_prompt_length", "warmup_ratio", "peft_config", "peft_config.task_type",
    "peft_config.bias",
}  # fmt: skip


def test_the_names_and_defaults_of_trl_are_those_of_the_installed_trl():
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.model_config import ModelConfig

    fields = {
        field.name: field.default
        for source in (DatasetMixtureConfig, ModelConfig, GRPOScriptArguments, GRPOConfig)
        for field in dataclasses.fields(source)
    }
    assert {name.removesuffix(".*") for row in rows("trl") for name in row.names} - set(fields) == NOT_IN_TRL
    listed = {row.name: row.default for row in rows("trl") if row.default is not NOT_SET and row.name in fields}
    assert {name: default for name, default in listed.items() if fields[name] != default} == {}


def sentence(folder: Path, text: str, *overrides: str) -> str:
    (folder / "recipe.yaml").write_text(SMALLEST + text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.load(folder / "recipe.yaml", overrides)
    return str(caught.value).removeprefix(f"{folder / 'recipe.yaml'}: ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.rollout.n=16", "'actor_rollout_ref.rollout.n' of verl; in dapo it is 'rollout.n': "),
        ("num_generations=8", "unknown key 'num_generations' of TRL; in dapo it is 'rollout.n': responses per prompt"),
        ("beta=0.1", "unknown key 'beta' of TRL; in dapo it is 'algorithm.kl_loss_coef': the same k3 term"),
        ("data.train_files=x", "unknown key 'data.train_files' of verl; in dapo it is 'data.train': "),
        ("algorithm.kl_ctrl.kl_coef=1", "unknown key 'algorithm.kl_ctrl.kl_coef' of verl; in dapo it is"),
        ("+trainer.save_freq=5", "unknown key 'trainer.save_freq' of verl; in dapo it is 'run.save_every': "),
        ("rollout.gpu_memory_utilization=0.8", "of verl; in dapo it is 'rollout.kv_memory_fraction': "),
        ("reward.overlong_buffer.enable=true", "of verl; in dapo it is 'reward.length_shaping': true is `buffer`"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "of verl; dapo has no such option: not needed: "),
        ("critic.optim.lr=1", "unknown key 'critic.optim.lr' of verl; dapo has no such option: there is no critic"),
        ("trainer.nonsense=1", "unknown key 'trainer.nonsense' of verl; docs/how-to/from-verl.md lists"),
        ("optim=adamw_torch", "'optim' is 'adamw_torch': the optimizer is AdamW with float32 states; "),
    ],
)  # fmt: skip
def test_a_name_of_verl_or_trl_is_answered_with_ours_and_what_differs(tmp_path, override, expected):
    message = sentence(tmp_path, "", override)
    assert expected in message
    assert "did you mean" not in message


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_every_name_gets_its_answer(tmp_path, row):
    for name in row.names:
        if name not in option_names() and name != "optim":
            message = sentence(tmp_path, "", f"{name.removesuffix('.*')}=1" if name[-1] != "*" else f"{name[:-1]}x=1")
            assert (f"in dapo it is '{row.ours}'" if row.ours else "dapo has no such option") in message


def test_an_option_of_theirs_in_a_section_of_ours_is_answered_with_ours(tmp_path):
    for text, answer in (
        (
            "rollout: {num_generations: 4}",
            "'rollout.num_generations' ('num_generations' of TRL); in dapo it is 'rollout.n'",
        ),
        ("algorithm: {use_kl_loss: true}", "'algorithm.use_kl_loss' ('use_kl_loss' of verl); in dapo it is"),
        ("use_kl_loss: true", "'use_kl_loss' of verl; in dapo it is 'algorithm.kl_loss_coef'"),
    ):
        assert f"unknown key {answer}" in sentence(tmp_path, text)


def test_nested_keys_of_yaml_are_answered_one_by_one_and_a_whole_file_with_the_command(tmp_path):
    text = "actor_rollout_ref: {actor: {clip_ratio_low: 0.2}, rollout: {n: 4}}\nlearning_rate: 1e-6\n"
    message = sentence(tmp_path, text)
    assert "'actor_rollout_ref.actor.clip_ratio_low' of verl; in dapo it is 'algorithm.clip_ratio_low'" in message
    assert "'actor_rollout_ref.rollout.n' of verl; in dapo it is 'rollout.n'" in message
    assert "'learning_rate' of TRL; in dapo it is 'optim.lr'" in message
    many = ", ".join(f"{name}: 1" for name in ("save_freq", "test_freq", "nnodes", "logger", "resume_mode"))
    message = sentence(tmp_path, f"trainer: {{{many}}}\n")
    assert message.endswith("2 more such keys; `dapo convert FILE` converts a whole file")


def test_names_that_are_ours_or_nobodys_are_answered_as_before(tmp_path):
    assert sentence(tmp_path, "lr: 1").endswith("unknown key 'lr'; did you mean 'optim.lr'?")
    assert sentence(tmp_path, "zebra: {stripes: 2}") == "unknown key 'zebra'"
    assert find("verl", "zebra") is None


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_pages_have_the_current_tables(system):
    page = (ROOT / "docs" / "how-to" / f"from-{system}.md").read_text(encoding="utf-8")
    introduction, _, table = page.partition(MARKER)
    assert introduction.strip()
    assert table == table_markdown(system), "python -m dapo.config.migration.pages"
