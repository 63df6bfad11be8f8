"""What a user sees: figures, and one sentence for each mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dapo.config import Config
from tests import runs

ROOT = Path(__file__).parent.parent


def dapo(*arguments: object):
    command = [sys.executable, "-m", "dapo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    recipe = runs.recipe(folder)
    done = dapo("train", recipe, "run.steps=2", "eval.k=8")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_training_prints_each_step_and_a_before_and_after_table(finished):
    _, done = finished
    lines = done.stdout.splitlines()
    assert any(line.split()[:1] == ["1"] and "4 kept" in line for line in lines)
    assert any(line.split()[:1] == ["2"] and "4 kept" in line for line in lines)
    assert "48 fresh samples before and after" in done.stdout
    assert "mean reward" in done.stdout
    assert "2 steps," in done.stdout


def test_metrics_as_json_are_one_object_per_step_with_the_names_users_know(finished):
    folder, _ = finished
    done = dapo("metrics", folder / "runs" / "recipe", "--json")
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    names = {
        "reward/mean", "acc/mean", "response_length/mean", "response_length/max", "response_length/clip_ratio",
        "entropy", "grad_norm", "clip_fraction/low", "clip_fraction/high", "groups/kept", "groups/dropped",
        "groups/carried", "groups/stale", "timing_s/generate", "timing_s/reward", "timing_s/train",
        "tokens/generated", "tokens/trained", "throughput/generated_tokens_per_s", "logprob_gap/mean",
    }  # fmt: skip
    assert names <= steps[0].keys()
    table = dapo("metrics", folder / "runs" / "recipe").stdout
    assert all(heading in table for heading in ("score", "acc", "entropy", "dropped", "s/step"))


def test_the_exported_directory_loads_in_plain_transformers(finished, tmp_path):
    folder, _ = finished
    done = dapo("export", folder / "runs" / "recipe", "--to", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "model" / "trainer").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again = dapo("export", folder / "runs" / "recipe", "--to", tmp_path / "model")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_damaged_checkpoint_is_not_exported_and_a_folder_that_cannot_be_made_is_one_sentence(finished, tmp_path):
    folder, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder / "runs" / "recipe", copy)
    weights = copy / "checkpoints" / "step_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = dapo("export", copy, "--to", tmp_path / "model")
    assert (done.returncode, "the checkpoint is damaged" in done.stderr) == (2, True)
    assert not (tmp_path / "model").exists()
    (tmp_path / "file").write_text("")
    done = dapo("export", folder / "runs" / "recipe", "--to", tmp_path / "file" / "model")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert str(tmp_path / "file") in done.stderr


def test_dry_run_prints_the_resolved_configuration_and_the_plan_and_writes_nothing(tmp_path):
    recipe = runs.recipe(tmp_path)
    done = dapo("train", recipe, "--dry-run", "optim.lr=5e-7")
    assert done.returncode == 0, done.stderr
    resolved, plan = done.stdout.split("\nplan, per step:")
    (tmp_path / "again.yaml").write_text(resolved)
    assert Config.load(tmp_path / "again.yaml") == Config.load(recipe, ["optim.lr=5e-7"])
    assert "memory    about" in plan
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data.trian_batch_size=3"], "unknown key 'data.trian_batch_size'; did you mean 'data.train_batch_size'?"),
        (["data.train_batch_size=many"], "'data.train_batch_size' is 'many'"),
        (["data.train=gone.jsonl"], "gone.jsonl: cannot be read"),
        (["data.max_prompt_length=5"], "more than data.max_prompt_length = 5"),
        (["reward.length_shaping=buffer", "reward.overlong_buffer.len=8"], "reward.overlong_buffer.len is 8"),
        (["reward.use=gone.py:reward"], "there is no file gone.py"),
        (["model.path=./no/such/model"], "./no/such/model"),
        (["rollout.top_p=0.9"], "must be 1 and 0 in training"),
        (["optim.lr"], "expected section.key=value"),
    ],
)
def test_bad_input_gets_one_sentence_exit_code_2_and_leaves_no_run_behind(tmp_path, arguments, sentence):
    done = dapo("train", runs.recipe(tmp_path), *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_fails_on_every_sample_of_the_first_round_stops_with_its_reason(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer):\n    return completion['text']")
    done = dapo("train", recipe)
    assert done.returncode == 2
    assert "judged none of the first 6 groups; the first reason: TypeError: string indices" in done.stderr


def test_an_empty_dataset_and_a_run_without_database(tmp_path):
    recipe = runs.recipe(tmp_path)
    (tmp_path / "data.jsonl").write_text("")
    done = dapo("train", recipe)
    assert (done.returncode, "no rows" in done.stderr) == (2, True)
    done = dapo("metrics", tmp_path / "nowhere")
    assert (done.returncode, "there is no run database here" in done.stderr) == (2, True)
