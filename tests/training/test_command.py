"""Test starting and resuming: a resumed run keeps its own options, and a new run never takes an existing one's name."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from dapo.checkpoint import folder as checkpoint
from dapo.config import Config
from dapo.errors import CheckpointError, RunExists
from dapo.store.configuration import recorded_config
from dapo.store.database import RunDatabase
from dapo.training.command import resume_training, start_training
from dapo.training.trainer import RunResult, Trainer
from tests import runs

ROOT = Path(__file__).parents[2]


def start(recipe: Path, *overrides: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert start_training(console, Config.load(recipe, overrides), overrides, recipe.stem) is None
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def resume(recipe: Path, *overrides: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert resume_training(console, Config.load(recipe, overrides), overrides, recipe.stem) is None
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def evaluated_steps(run: Path) -> list[int]:
    with RunDatabase.open_readonly(run / "run.db") as database:
        return [row["step"] for row in database.evals()]


def test_a_resumed_run_keeps_its_options_and_lists_what_is_changed_and_what_the_recipe_would_change(tmp_path):
    recipe, run = runs.recipe(tmp_path), tmp_path / "runs" / "recipe"
    start(recipe, "run.steps=1", "optim.lr=0.003", "eval.k=4")
    printed = resume(recipe, "run.steps=2")
    kept = recorded_config(run)
    assert (kept.optim.lr, kept.eval.k, kept.run.steps) == (0.003, 4, 2)
    own, other = recorded_config(run), Config.load(recipe)
    assert f"optim.lr stays 0.003, as in the run so far; the recipe has {other.optim.lr}" in printed
    assert "changed on resume: run.steps 1 -> 2" in printed
    printed = resume(recipe, "run.steps=3", "optim.lr=0.001")
    assert "optim.lr 0.003 -> 0.001" in printed
    assert "optim.lr stays" not in printed
    assert recorded_config(run).optim.lr == 0.001
    assert own.differences(recorded_config(run)) == {"run.steps": (2, 3), "optim.lr": (0.003, 0.001)}
    with RunDatabase.open_readonly(run / "run.db") as database:
        changes = [event["message"] for event in database.events() if event["kind"] == "configuration"]
    assert changes[-1] == "changed on resume: run.steps 2 -> 3; optim.lr 0.003 -> 0.001"


def test_a_resumed_run_shows_the_table_of_the_whole_run_and_all_its_seconds(tmp_path):
    recipe = runs.recipe(tmp_path)
    options = ("eval.k=4", "eval.every=0")
    first = Trainer(Config.load(recipe, ("run.steps=1", *options))).train()
    second = Trainer(Config.load(recipe, ("run.steps=2", *options)), resume=True).train()
    assert second.seconds > first.seconds > 0
    assert [report.step for report in second.before] == [0] * len(first.before)
    assert [report.step for report in second.after] == [2] * len(first.after)
    for recorded, original in zip(second.before, first.before, strict=True):
        assert recorded.metrics == dict(original.metrics)
        assert [(s.prompt.uid, s.rollout.text, len(s.rollout), s.score.acc) for s in recorded.samples] == [
            (s.prompt.uid, s.rollout.text, len(s.rollout), s.score.acc) for s in original.samples
        ]
    assert "before and after" in resume(recipe, "run.steps=3")


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_resume_may_change_the_samples_per_question(tmp_path, k):
    recipe = runs.recipe(tmp_path)
    start(recipe, "run.steps=1", "eval.k=2")
    printed = resume(recipe, "run.steps=2", f"eval.k={k}")
    assert "2 steps," in printed  # the line after the table


def test_the_same_recipe_again_gets_the_next_free_name_unless_a_name_is_given(tmp_path):
    recipe = runs.recipe(tmp_path)
    start(recipe, "run.steps=1", "eval.k=0")
    printed = start(recipe, "run.steps=1", "eval.k=0")
    assert f"this one is {tmp_path / 'runs' / 'recipe-2'}" in printed.replace("\n", "")
    start(recipe, "run.steps=1", "eval.k=0")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"recipe", "recipe-2", "recipe-3"}
    with pytest.raises(RunExists, match="already holds a run"):
        start(recipe, "run.steps=1", "run.name=recipe")


def test_the_hint_to_look_at_a_run_names_a_path_only_if_the_shell_would_find_no_or_another_dapo(tmp_path, monkeypatch):
    (program := tmp_path / "dapo").write_text("#!/bin/sh")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = runs.recipe(tmp_path)
    assert "\ndapo view " in start(recipe, "run.steps=1", "eval.k=0")
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"\n{program} view " in start(recipe, "run.steps=1", "eval.k=0")


def test_resuming_what_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        resume(runs.recipe(tmp_path))


def interrupted(config: Config, step: int) -> RunResult:
    result = Trainer(config, reporter=runs.Interrupts(step)).train()
    assert result.signal == signal.SIGINT
    return result


@pytest.mark.parametrize("mode", ["strict", "inflight"])
def test_a_signal_during_an_evaluation_ends_it_and_a_resume_makes_up_for_it(tmp_path, mode):
    options = ("run.steps=4", "eval.every=2", "eval.k=64", "rollout.max_concurrent=8", f"rollout.mode={mode}")
    config = Config.load(runs.recipe(tmp_path), options)
    result = interrupted(config, step=2)
    assert result.steps == 2
    assert evaluated_steps(config.run_dir) == [0]
    resumed = Trainer(config, resume=True).train()
    assert resumed.steps == 4
    assert evaluated_steps(config.run_dir) == [0, 2, 4]


def test_a_signal_during_the_first_evaluation_ends_the_run_before_it_trains(tmp_path):
    config = Config.load(runs.recipe(tmp_path), ("run.steps=1", "eval.k=64", "rollout.max_concurrent=8"))
    assert interrupted(config, step=0).steps == 0
    assert evaluated_steps(config.run_dir) == []
    assert Trainer(config).train().steps == 1, "a run without a step does not block its name"


def evaluated(run: Path) -> list[tuple[int, str, dict[str, float]]]:
    with RunDatabase.open_readonly(run / "run.db") as database:
        return [(row["step"], row["name"], row["metrics"]) for row in database.evals()]


def ending(run: Path) -> str:
    with RunDatabase.open_readonly(run / "run.db") as database:
        return database.endings()[-1]["kind"]


def assert_finished_like(whole: Config, config: Config) -> None:
    assert ending(config.run_dir) == ending(whole.run_dir) == "finished"
    assert runs.metrics(config.run_dir) == runs.metrics(whole.run_dir)
    assert evaluated(config.run_dir) == evaluated(whole.run_dir)
    assert checkpoint.best(config.run_dir / "checkpoints") == checkpoint.best(whole.run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match="has already finished"):
        Trainer(config, resume=True)


LAST_ONLY = ("eval.every=0", "eval.k=8", "eval.best_metric=hard/reward/mean", "rollout.max_concurrent=4")


@pytest.mark.parametrize("end", [("run.steps=1",), ("run.steps=null", "run.epochs=0.5")])
def test_a_run_is_finished_only_after_its_last_evaluation(tmp_path, end):
    """A signal interrupts the second of two sets."""
    recipe, options = runs.recipe(tmp_path, eval={"data": runs.eval_sets(tmp_path)}), (*LAST_ONLY, *end)
    whole, config = (Config.load(recipe, (*options, f"run.name={name}")) for name in ("whole", "broken"))
    Trainer(whole).train()
    trainer = Trainer(config, reporter=runs.Interrupts(1, signal.SIGTERM, "hard"))
    assert trainer.train().signal == signal.SIGTERM
    assert trainer.step == 1
    assert ending(config.run_dir) == "interrupted"
    resumed = Trainer(config, resume=True).train()
    assert [report.step for report in resumed.after] == [1, 1]
    assert_finished_like(whole, config)


KILLED = """
import signal, sys
from dapo.config import Config
from dapo.training.trainer import Trainer
from tests import runs

step, recipe, *options = sys.argv[1:]
killer = runs.Interrupts(int(step), signal.SIGKILL, "hard")
Trainer(Config.load(recipe, options), resume=step == "0", reporter=killer).train()
"""


@pytest.mark.slow
def test_a_run_killed_in_its_last_evaluation_makes_up_for_it_also_if_the_resume_is_killed_there(tmp_path):
    recipe = runs.recipe(tmp_path, eval={"data": runs.eval_sets(tmp_path)})
    options = (*LAST_ONLY, "run.steps=2", "run.save_every=1", "run.name=broken")
    whole, config = (Config.load(recipe, (*options, name)) for name in ("run.name=whole", "run.name=broken"))
    Trainer(whole).train()
    command = [sys.executable, "-c", KILLED]
    assert subprocess.run([*command, "2", recipe, *options], cwd=ROOT).returncode == -signal.SIGKILL
    assert Trainer(config, resume=True, reporter=runs.Interrupts(2)).train().signal == signal.SIGINT
    assert subprocess.run([*command, "0", recipe, *options], cwd=ROOT).returncode == -signal.SIGKILL
    Trainer(config, resume=True).train()
    assert_finished_like(whole, config)
