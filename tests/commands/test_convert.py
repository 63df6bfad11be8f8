"""Tests of `dapo convert` in real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dapo.config import Config

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """\
data=${DATA:-train.jsonl}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$data \\
    actor_rollout_ref.model.path=$MODEL_PATH \\
    actor_rollout_ref.rollout.n=$((2 * 4)) \\
    actor_rollout_ref.actor.entropy_coeff=0.01 \\
    trainer.total_training_steps=5
"""


def dapo(*arguments: object, **environment: str):
    command = [sys.executable, "-m", "dapo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "", **environment})


def test_a_script_becomes_a_recipe_on_standard_output(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    done = dapo("convert", tmp_path / "run.sh", MODEL_PATH="Qwen/Qwen2.5-0.5B")
    assert (done.returncode, done.stderr) == (0, "")
    recipe = yaml.safe_load(done.stdout)
    assert (recipe["rollout"]["n"], recipe["model"]["path"], recipe["run"]["steps"]) == (8, "Qwen/Qwen2.5-0.5B", 5)
    assert "# - MODEL_PATH comes from the environment" in done.stdout
    assert "# - actor_rollout_ref.actor.entropy_coeff=0.01: There is no entropy bonus" in done.stdout


def test_a_recipe_is_written_to_a_file_that_loads_and_what_is_missing_is_said(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    done = dapo("convert", tmp_path / "run.sh", "--to", tmp_path / "recipe.yaml", MODEL_PATH="m")
    assert done.returncode == 0, done.stderr
    assert re.match(rf"wrote {tmp_path}/recipe.yaml: \d+ options\n", done.stdout)
    assert "No counterpart, so the run differs here:\n- actor_rollout_ref.actor.entropy_coeff=0.01: " in done.stdout
    assert Config.load(tmp_path / "recipe.yaml").rollout.n == 8
    done = dapo("convert", tmp_path / "run.sh", "--to", tmp_path / "other.yaml")
    assert "it does not load yet: 'model' is missing" in done.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("echo hello\n", "found no call of verl; expected a line such as `python3 -m verl.trainer.main_ppo key=value`"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence_and_exit_code_two(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    done = dapo("convert", tmp_path / "run.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/run.sh: {expected}\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run.sh", SCRIPT, "a launch script of verl, or of a Python file with TRL's GRPOConfig"),
        ("a.yaml", "data: {train_files: x, train_batch_size: 4}\ntrainer: {nnodes: 1}\n", "this configuration of verl"),
        ("b.yaml", "num_generations: 8\noptim: adamw_torch\n", "this configuration of TRL"),
    ],
)
def test_a_file_of_verl_or_trl_that_is_trained_is_answered_with_the_command(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    done = dapo("train", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {path}: not a recipe; `dapo convert {path}` makes a recipe of {expected}\n"
