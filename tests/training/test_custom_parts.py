"""Whole runs with parts of the user: the examples of docs/how-to/custom-parts.md, objects, resuming, and mistakes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dapo import Config, CustomParts, Trainer
from dapo.algorithm.ratio import LossConfig
from dapo.errors import ConfigError, PartError
from dapo.store.database import RunDatabase
from tests import make, runs

PAGE = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "custom-parts.md").read_text(encoding="utf-8")
*FUNCTIONS, FROM_PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OPTIONS,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES: dict[str, Any] = {}
exec("\n".join(FUNCTIONS), EXAMPLES)


def train(config: Config, **options: Any) -> None:
    trainer = Trainer(config, **options)
    try:
        trainer.train()
    finally:
        trainer.close()


def changes(run_dir: Path) -> list[str]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [event["message"] for event in database.events() if event["kind"] == "configuration"]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A recipe with every part of the page, in a folder with its parts.py."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text("\n".join(FUNCTIONS), encoding="utf-8")
    path = runs.recipe(tmp_path, run={"dir": "runs", "steps": 4, "save_every": 2})
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, section in yaml.safe_load(OPTIONS).items():
        values[name] = values.get(name, {}) | section
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_the_examples_compute_what_the_page_says():
    assert EXAMPLES["leave_one_out"](np.array([1.0, 0.0, 0.5])).tolist() == [0.75, -0.75, 0.0]
    new, old = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -1.0, -1.5])
    responses, advantages = torch.tensor([1, 1, 2]), torch.tensor([1.0, 1.0, -1.0])
    loss, metrics = EXAMPLES["truncated"](new, old, advantages, responses, LossConfig())
    torch.testing.assert_close(loss, torch.tensor([1.0, 1.0, -1.0]) * np.exp(0.5))
    assert metrics["truncated"].tolist() == [False, False, False]
    decide = EXAMPLES["neither_too_easy_nor_too_hard"]
    for right, verdict in ((0, "too_hard"), (1, "kept"), (4, "too_easy")):
        assert decide(make.group([1.0, 0.0, 0.0, 0.0], accs=[i < right for i in range(4)])) == verdict
    shaping = EXAMPLES["short_when_wrong"]
    assert [shaping(0.0, 4, 8, False), shaping(1.0, 4, 8, False)] == [-0.25, 0.0]
    factors = [EXAMPLES["decay_at_the_end"](step, 10) for step in (0, 8, 9)]
    assert factors == pytest.approx([1.0, 1.0, 0.5])


def test_a_run_with_every_example_of_the_page_uses_all_of_them_and_resumes_bit_for_bit(recipe):
    whole, resumed = (Config.load(recipe, [f"run.name={name}"]) for name in ("whole", "resumed"))
    train(whole)
    shutil.copytree(whole.run_dir, resumed.run_dir)
    shutil.rmtree(resumed.run_dir / "checkpoints" / "step_4")
    train(resumed, resume=True)
    metrics = runs.metrics(whole.run_dir)
    assert metrics == runs.metrics(resumed.run_dir)
    one, two = (runs.weights(config.run_dir, 4) for config in (whole, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert changes(resumed.run_dir) == ["changed on resume: run.name 'whole' -> 'resumed'"]  # no file has changed

    assert all("loss/truncated" in step and "clip_fraction/high" not in step for step in metrics)
    assert [step["lr"] for step in metrics] == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3])  # the decay has no room
    dropped = {name for step in metrics for name in step if name.startswith("groups/dropped/")}
    assert dropped and dropped <= {"groups/dropped/too_easy", "groups/dropped/too_hard"}
    with RunDatabase.open_readonly(whole.run_dir / "run.db") as database:
        for group in database.groups():
            rollouts = list(database.rollouts(group["serial"]))
            for rollout in rollouts:
                added = 0.0 if rollout["score"] > 0 else -0.5 * rollout["length"] / 8
                assert rollout["reward"] == pytest.approx(rollout["score"] + added)
            rewards = np.array([rollout["reward"] for rollout in rollouts])
            expected = EXAMPLES["leave_one_out"](rewards)
            assert [rollout["advantage"] for rollout in rollouts] == pytest.approx(expected.tolist())


def test_the_python_example_of_the_page_trains_and_its_objects_are_needed_again(recipe):
    sections = yaml.safe_load(recipe.read_text())
    del sections["algorithm"]["advantage"], sections["optim"]["lr_schedule"]
    sections["run"]["steps"] = 1
    recipe.write_text(yaml.safe_dump(sections))
    names = dict(EXAMPLES)
    exec(FROM_PYTHON, names)
    assert names["result"].steps == 1
    run_dir = names["result"].run_dir
    recorded = Config.load(run_dir / "config.yaml", ["run.name=recipe", "run.steps=2"])
    assert recorded.algorithm.advantage == "python:leave_one_out"
    with pytest.raises(PartError, match=r"algorithm.advantage is 'python:leave_one_out'.*pass it to Trainer again"):
        Trainer(recorded, resume=True)
    parts = CustomParts(advantage=EXAMPLES["leave_one_out"], lr_schedule=EXAMPLES["decay_at_the_end"])
    train(recorded, parts=parts, resume=True)
    assert len(runs.metrics(run_dir)) == 2


def test_a_file_that_changed_is_reported_on_resume_once(recipe):
    def load(steps: int) -> Config:
        return Config.load(recipe, ["run.name=run", f"run.steps={steps}", "run.save_every=1"])

    train(load(1))
    for name in ("parts.py", "reward.py"):
        with Path(name).open("a") as file:
            file.write("\n# changed\n")
    train(load(2), resume=True)
    train(load(3), resume=True)
    first, second = changes(load(3).run_dir)
    for option in ("algorithm.loss", "algorithm.advantage", "optim.lr_schedule", "reward.length_shaping", "reward.use"):
        assert re.search(rf"file of {option} [0-9a-f]{{16}} -> [0-9a-f]{{16}}", first)
    assert second == "changed on resume: run.steps 2 -> 3"


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("algorithm.loss", "parts.py:lost", "algorithm.loss: parts.py has no function or class 'lost'; available: "),
        ("algorithm.advantage", "gone.py:f", "algorithm.advantage: there is no file gone.py; relative paths start at"),
        ("optim.lr_schedule", "broken.py:f", r"optim.lr_schedule: broken.py cannot be imported \(SyntaxError"),
        ("reward.length_shaping", "odd.py:f", r"reward.length_shaping: odd.py:f raised ValueError: no \(odd.py:2\)"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_before_anything_is_written(recipe, option, value, sentence):
    Path("broken.py").write_text("def f(:")
    Path("odd.py").write_text("def f(*arguments):\n    raise ValueError('no')")
    with pytest.raises(PartError, match=sentence):
        Trainer(Config.load(recipe, [f"{option}={value}"]))
    assert not Path("runs").exists()


def test_a_part_that_fails_in_the_middle_ends_the_run_in_one_sentence_and_the_run_can_resume(recipe):
    Path("late.py").write_text("def keep(group):\n    return 'kept' if group.serial < 12 else 3")
    config = Config.load(recipe, ["run.name=late", "algorithm.filter_groups.function=late.py:keep", "run.save_every=1"])
    with pytest.raises(PartError, match=r"algorithm.filter_groups.function: late.py:keep returned a int; expected"):
        train(config)
    Path("late.py").write_text("def keep(group):\n    return 'kept'")
    train(config, resume=True)
    assert len(runs.metrics(config.run_dir)) == 4


def test_an_object_that_contradicts_the_options_or_is_no_function_is_refused(recipe):
    config = Config.load(recipe, ["algorithm.advantage=null", "algorithm.adv_norm=none"])
    with pytest.raises(ConfigError, match=r"algorithm.advantage .*contradicts algorithm.adv_norm none"):
        Trainer(config, parts=CustomParts(advantage=EXAMPLES["leave_one_out"]))
    with pytest.raises(PartError, match="the part loss is a float; expected a function"):
        Trainer(config, parts=CustomParts(loss=0.5))  # pyright: ignore[reportArgumentType]
