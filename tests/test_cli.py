"""Tests of the command line in real processes: what it prints, and one sentence for each mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dapo.cli import app
from dapo.commands.preflight import check_run
from dapo.config import Config
from dapo.errors import CheckpointError, ConfigError
from dapo.evaluation.subjects import resolve
from dapo.store.database import RunDatabase
from dapo.types import Event
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
    assert any(line.split()[2:3] == ["1"] and "4 kept" in line for line in lines)
    assert any(line.split()[2:3] == ["2"] and "4 kept" in line for line in lines)
    assert "6 questions x 8 fresh samples, before and after" in done.stdout
    assert all(text in done.stdout for text in ("reward", "avg@8", "points ["))
    assert "2 steps," in done.stdout


def test_piped_lines_have_their_time_and_no_control_characters(finished):
    _, done = finished
    for line in done.stdout.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d($| )", line), line
        assert line.isprintable()
    assert done.stderr == ""


def test_quiet_prints_only_warnings_and_the_result_and_verbose_also_options_and_timings(finished, tmp_path):
    folder, normal = finished
    options = (runs.recipe(tmp_path), "run.steps=2", "eval.k=8", f"model.path={folder}/model")
    quiet = dapo("train", *options, "-q").stdout
    assert "before and after" in quiet and "2 steps," in quiet
    assert not re.search(r"kept|evaluation|data:|finished", quiet.replace("data: 6 questions", ""))
    verbose = dapo("resume", tmp_path / "runs" / "recipe", "run.steps=3", "-v").stdout
    assert " optim:" in verbose and "ppo_mini_batch_size: 2" in verbose
    assert re.search(r"generate [\d.]+ s, reward [\d.]+ s, train [\d.]+ s; [\d,]+ tokens/s generated", verbose)
    assert "ppo_mini_batch_size" not in normal.stdout and "tokens/s" not in normal.stdout
    with pytest.raises(ConfigError, match=r"^-q and -v contradict each other; give one of them$"):
        CliRunner().invoke(app, ["train", *map(str, options), "-qv"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["train", "r.yaml", "--steps", "4"], "dapo train; options of a run are given without dashes: run.steps=4"),
        (["train", "--lr=1e-5", "r.yaml"], "are given without dashes: optim.lr=1e-5"),
        (["resume", "runs/r", "--run.steps", "4"], "are given without dashes: run.steps=4"),
        (["plan", "r.yaml", "--train-batch-size", "-v"], "are given without dashes: data.train_batch_size=..."),
        (["eval", "m", "--temperature", "1"], "dashes: rollout.temperature=1 or eval.temperature=1"),
        (["train", "r.yaml", "--zzz"], "are given without dashes: for example optim.lr=1e-5"),
        (["train", "r.yaml", "--dry-rn"], "--dry-rn is not an option of dapo train; did you mean '--dry-run'?"),
        (["judge", "--anser", "7", "5"], "--anser is not an option of dapo judge; did you mean '--answer'?"),
        (
            ["data", "check", "--regex", "7"],
            "dapo data check; options of a run are given without dashes: reward.regex=7",
        ),
    ],
)
def test_an_unknown_option_names_the_option_of_a_run_that_may_be_meant(arguments, end):
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False, prog_name="dapo")
    assert str(caught.value).endswith(end)


@pytest.mark.parametrize("command", [(), ("train",), ("data", "check")])
def test_h_is_help(command):
    found = CliRunner().invoke(app, [*command, "-h"])
    assert found.exit_code == 0
    assert "Usage:" in found.output


def test_shell_completion_can_be_shown():
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "dapo", "--show-completion", "bash"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "complete -o" in done.stdout


def test_metrics_as_json_are_one_object_per_step_with_the_documented_names(finished):
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


def test_metrics_show_the_newest_events(finished, tmp_path):
    folder, _ = finished
    quiet = dapo("metrics", folder / "runs" / "recipe").stdout
    assert "finished" not in quiet and "events" not in quiet
    shutil.copytree(folder / "runs" / "recipe", tmp_path / "copy")
    with RunDatabase.open(tmp_path / "copy" / "run.db") as database:
        for number in range(7):
            database.record_event(Event("worker", f"rollout worker {number} died", 1))
    shown = dapo("metrics", tmp_path / "copy").stdout.splitlines()
    assert shown[-6] == "7 events; the newest are:"
    assert shown[-5:] == [f"worker at step 1: rollout worker {number} died" for number in range(2, 7)]


def test_the_exported_directory_loads_in_plain_transformers(finished, tmp_path):
    folder, _ = finished
    done = dapo("export", folder / "runs" / "recipe", "--to", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "model" / "trainer").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again = dapo("export", folder / "runs" / "recipe", "--to", tmp_path / "model")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_damaged_checkpoint_and_an_impossible_folder_are_one_sentence_each_on_export(finished, tmp_path):
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


def test_the_printed_configuration_is_a_recipe(tmp_path):
    recipe = runs.recipe(tmp_path)
    options = ["optim.lr=5e-7", "run.steps=null", "run.epochs=2", 'run.name="\u00e9: #1"']
    done = dapo("train", recipe, "--print-config", *options)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "again.yaml").write_text(done.stdout)
    assert Config.load(tmp_path / "again.yaml") == Config.load(recipe, options)
    assert not (tmp_path / "runs").exists()


def test_dry_run_lists_what_is_there_and_the_plan_and_writes_nothing(tmp_path):
    recipe = runs.recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = dapo("train", recipe, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    checks, plan = done.stdout.split("plan, per step:")
    for part in ("run: ", "reward: ", "model: ", "data: ", "disk: a checkpoint takes 3"):
        assert f"  ok        {part}" in checks
    assert re.search(r"memory    about \d+ kB", plan)
    assert "GiB" not in done.stdout  # one unit for the checks and the plan
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_names_everything_that_is_missing(tmp_path):
    recipe = runs.recipe(tmp_path)
    options = ["eval.data=[gone.csv, none/*.jsonl]", "reward.use={maths: 1, a.py:f: 1}", "model.device=cuda:7"]
    options += ["data.max_response_length=5000", "rollout.engine=vllm"]
    done = dapo("train", recipe, "--dry-run", *options)
    assert done.returncode == 2
    starts = [
        "reward.use is 'maths', which is not a judge",
        "reward.use: there is no file a.py",
        "model.device is 'cuda:7', but PyTorch finds",
        "the model's context is 512 tokens",
        "gone.csv: cannot be read",
        "none/*.jsonl: no file matches",
        "rollout.engine is vllm, but vLLM is not installed",
    ]
    for line, start in zip(done.stderr.splitlines(), starts, strict=True):
        assert line.startswith(f"error: {start}")
        assert start not in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data.trian_batch_size=3"], "unknown key 'data.trian_batch_size'; did you mean 'data.train_batch_size'?"),
        (["data.train_batch_size=many"], "'data.train_batch_size' is 'many'"),
        (["data.train=gone.jsonl"], "gone.jsonl: cannot be read"),
        (["data.max_prompt_length=5"], "6 prompts over 5 tokens left out; no question is left"),
        (["data.max_prompt_length=5", "data.overlong_prompts=raise"], "more than data.max_prompt_length = 5"),
        pytest.param(
            ["data.train=gym:gdc"],
            "no such task in reasoning-gym; did you mean 'gcd'?",
            marks=pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym"),
        ),
        (["data.prompt_template=daop"], "expected text that contains {question}, or the name of a template"),
        (["reward.use=maths"], "which is not a judge; did you mean 'math'?"),
        (["eval.best_metric=data/avg@3"], "eval.best_metric needs an evaluation"),
        (["reward.length_shaping=buffer", "reward.overlong_buffer.len=8"], "reward.overlong_buffer.len is 8"),
        (["reward.use=gone.py:reward"], "there is no file gone.py"),
        (["model.path=./no/such/model"], "./no/such/model"),
        (["rollout.top_p=0.9"], "rollout.top_p is not an option"),
        (["optim.lr"], "expected section.key=value"),
        (["run.name=off"], "'run.name' is False: input should be a valid string; YAML reads on, off"),
        (["cluster.workers=2"], "did you mean 'cluster.rollout_workers' or 'cluster.reward_workers'?"),
    ],
)
def test_bad_input_gets_one_sentence_exit_code_2_and_leaves_no_run_behind(tmp_path, arguments, sentence):
    done = dapo("train", runs.recipe(tmp_path), *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_fails_on_every_response_of_the_first_round_stops_the_run_with_its_reason(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer):\n    return completion['text']")
    done = dapo("train", recipe)
    assert done.returncode == 2
    assert "judged none of the first 6 groups; the first reason: TypeError: string indices" in done.stderr


def test_an_empty_dataset_and_a_run_without_a_database_are_one_sentence_each(tmp_path):
    recipe = runs.recipe(tmp_path)
    (tmp_path / "data.jsonl").write_text("")
    done = dapo("train", recipe)
    assert (done.returncode, "no rows" in done.stderr) == (2, True)
    done = dapo("metrics", tmp_path / "nowhere")
    assert (done.returncode, "there is no run here" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["metrics", "resume"])
def test_a_folder_of_runs_is_refused_with_the_name_of_one_of_them(finished, command):
    folder, _ = finished
    done = dapo(command, folder / "runs")
    assert done.returncode == 2
    assert "there is no run here" in done.stderr
    assert f"name one of the runs in it, such as {folder / 'runs'}/" in " ".join(done.stderr.split())


def test_a_run_and_its_base_model_are_evaluated_together_and_every_sample_is_stored(finished, tmp_path):
    folder, _ = finished
    run, base = folder / "runs" / "recipe", folder / "model"
    options = ["--data", folder / "data.jsonl", "--k", "4", "--out", tmp_path / "eval", "--json", tmp_path / "all.json"]
    done = dapo("eval", base, run, f"{run}@2", *options, "eval.temperature=0.7")
    assert done.returncode == 0, done.stderr
    assert "data: 6 questions x 4 samples" in done.stdout
    assert "difference from model" in done.stdout
    models = json.loads((tmp_path / "all.json").read_text())["sets"]["data"]["models"]
    assert [model["model"] for model in models] == ["model", "recipe@2", "recipe@2-2"]
    assert models[1]["metrics"] == models[2]["metrics"]  # the same weights, questions and random numbers
    with RunDatabase.open_readonly(tmp_path / "eval" / "recipe@2" / "run.db") as database:
        (recorded,) = database.evals()
    assert recorded["metrics"]["avg@4"] == models[1]["metrics"]["avg@4"]
    assert "evaluation of data at step 2: avg@4" in dapo("metrics", tmp_path / "eval" / "recipe@2").stdout


def test_a_missing_run_is_not_looked_up_on_the_hub(finished, tmp_path, monkeypatch):
    folder, _ = finished
    with pytest.raises(CheckpointError, match=r"runs/nope: there is no such run or model in"):
        resolve([str(folder / "runs" / "nope")], data="none")
    monkeypatch.chdir(tmp_path)  # where nothing has been trained yet
    with pytest.raises(CheckpointError, match="runs/nope: there is no such run or model in runs"):
        resolve(["runs/nope"], data="none")
    assert [subject.label for subject in resolve(["someone/some-model"], data="none")] == ["some-model"]


def test_data_check_counts_repeats_and_bad_rows_and_exits_with_1(tmp_path):
    rows = [{"question": "2+2?", "answer": "4"}, {"question": "2+2?", "answer": "4"}, {"question": "3?"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    done = dapo("data", "check", path)
    assert done.returncode == 1
    assert "rows.jsonl, line 3: column 'answer' is missing" in " ".join(done.stdout.split())
    assert "the rule math can read 1 of 1 answers" in done.stdout
    path.write_text("\n".join(map(json.dumps, rows[:2])))
    done = dapo("data", "check", path, "--reward", "integer")
    assert (done.returncode, "the rule integer can read 1 of 1 answers" in done.stdout) == (0, True)
    done = dapo("data", "check", path, "data.columns={prompt: question, answer: none}", "--reward={exact: 1.0}")
    assert (done.returncode, "there is no column 'none'" in done.stdout) == (1, True)
    done = dapo("data", "check", path, "--reward", "maths")
    assert (done.returncode, "did you mean 'math'?" in done.stderr) == (2, True)


def test_data_prepare_writes_what_the_recipe_names(tmp_path):
    rows = [{"question": "How many?", "answer": "Six and six.\n#### 12"}] * 2
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = dapo("data", "prepare", "gsm8k", "--from", tmp_path / "mine.jsonl", "--to", tmp_path / "data")
    assert (done.returncode, "1 question (2 rows" in done.stdout) == (0, True), done.stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{path: m}}\ndata: {{train: {tmp_path}/data/gsm8k.parquet}}")
    assert check_run(Config.load(recipe)).missing == []
    (tmp_path / "data" / "gsm8k.parquet").unlink()
    (sentence,) = check_run(Config.load(recipe)).missing
    assert "`dapo data prepare gsm8k` writes it" in sentence


def test_the_version_is_printed():
    assert dapo("--version").stdout == "dapo 0.1.0\n"
