"""Tests of evaluations during training: recorded whole or not at all, made up for on resume, and marked best."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dapo import Callback
from dapo.checkpoint import folder as checkpoint
from dapo.config import Config
from dapo.errors import ConfigError
from dapo.store.database import RunDatabase
from dapo.terminal.console import Reporter
from dapo.training.result import RunResult
from dapo.training.trainer import Trainer
from tests import runs
from tests.training.test_command import resume, start


def options(folder: Path, *others: str, metric: str = "hard/reward/mean") -> tuple[str, ...]:
    """Two sets, which the recipe does not list in the order of their names."""
    sets = runs.eval_sets(folder)
    data = f"eval.data={{hard: {sets['hard']}, easy: {sets['easy']}}}"
    return (data, "eval.k=2", "eval.every=1", f"eval.best_metric={metric}", "rollout.max_concurrent=4", *others)


class BreaksAt(Reporter):
    """Counts the calls from the first step's evaluation on; at call number `at` the run is interrupted or dies."""

    def __init__(self, at: int | None = None, *, dies: bool = False) -> None:
        self.at, self.dies, self.is_on, self.calls = at, dies, False, 0

    def step(self, report) -> None:
        self.is_on = True

    def phase(self, name: str) -> None:
        if name.startswith(("evaluating", "saving")):
            self._call()

    def evaluation(self, report) -> None:
        self._call()

    def _call(self) -> None:
        self.calls += self.is_on
        if self.is_on and self.calls == self.at:
            if self.dies:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)


def records(result: RunResult) -> tuple:
    """Return what must not depend on interruptions: metrics, evaluations, best mark, and what the table shows."""
    with RunDatabase.open_readonly(result.run_dir / "run.db") as database:
        evaluations = [(row["step"], row["name"], row["metrics"]) for row in database.evals()]
        assert database.is_finished()
    table = [(report.step, report.name, dict(report.metrics)) for report in (*result.before, *result.after)]
    return runs.metrics(result.run_dir), evaluations, checkpoint.best(result.run_dir / "checkpoints"), table


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_interrupted_anywhere_in_an_evaluation_resumes_to_the_same_records_best_mark_and_table(tmp_path, every):
    recipe, counter = runs.recipe(tmp_path), BreaksAt()
    common = options(tmp_path, "run.steps=2", "run.save_every=1")
    whole = records(Trainer(Config.load(recipe, (*common, "run.name=whole")), reporter=counter).train())
    assert [name for _, name, _ in whole[3]] == ["hard", "easy"] * 2
    assert counter.calls >= 10, "each of two evaluations has samples of two sets, two reports, and a checkpoint"
    for point in range(1, counter.calls + 1, every):
        dies = point % 2 == 0
        config = Config.load(recipe, (*common, f"run.name=broken-{point}"))
        try:
            Trainer(config, reporter=BreaksAt(point, dies=dies)).train()
        except KeyboardInterrupt:
            assert dies
        with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
            names = [row["name"] for row in database.evals()]
            is_finished = database.is_finished()
        assert names == ["easy", "hard"] * (len(names) // 2), f"half an evaluation was recorded at call {point}"
        if not is_finished:
            assert records(Trainer(config, resume=True, quiet=True).train()) == whole, f"at call {point}"


def test_a_resumed_run_prints_the_tables_of_an_uninterrupted_one(tmp_path):
    recipe, common = runs.recipe(tmp_path), options(tmp_path, "eval.every=0")
    start(recipe, *common, "run.name=halved", "run.steps=1")
    printed = [
        resume(recipe, *common, "run.name=halved", "run.steps=2"),
        start(recipe, *common, "run.name=whole", "run.steps=2"),
    ]
    halved, whole = (text[text.index("before and after") : text.index("2 steps, ")] for text in printed)
    assert halved == whole


def test_an_evaluation_that_another_set_was_added_to_is_made_again(tmp_path):
    recipe, sets = runs.recipe(tmp_path), runs.eval_sets(tmp_path)
    common = ("eval.k=2", "eval.every=1", "run.save_every=1")
    Trainer(Config.load(recipe, (*common, "run.steps=1", f"eval.data={{hard: {sets['hard']}}}"))).train()
    both = f"eval.data={{hard: {sets['hard']}, easy: {sets['easy']}}}"
    result = Trainer(Config.load(recipe, (*common, "run.steps=2", both)), resume=True).train()
    with RunDatabase.open_readonly(result.run_dir / "run.db") as database:
        found = [(row["step"], row["name"]) for row in database.evals()]
    assert found == [(0, "hard"), (1, "easy"), (1, "hard"), (2, "easy"), (2, "hard")]


def test_an_evaluation_of_other_questions_is_made_again(tmp_path):
    recipe, sets = runs.recipe(tmp_path), runs.eval_sets(tmp_path)
    common = ("eval.k=2", "eval.every=1", "run.save_every=1")
    Trainer(Config.load(recipe, (*common, "run.steps=1", f"eval.data={{mine: {sets['easy']}}}"))).train()
    (tmp_path / "new.jsonl").write_text('{"prompt": "something new", "answer": 1}', encoding="utf-8")
    others = f"eval.data={{mine: {tmp_path / 'new.jsonl'}}}"
    trainer = Trainer(Config.load(recipe, (*common, "run.steps=2", others)), resume=True)
    asked = {prompt.uid for prompt in trainer.data.eval_sets["mine"]}
    result = trainer.train()
    with RunDatabase.open_readonly(result.run_dir / "run.db") as database:
        found = [{sample.prompt.uid for sample in database.eval_reports(step)[0].samples} for step in range(3)]
    assert found[0] != asked and found[1:] == [asked, asked]
    assert result.before == ()  # it had other questions


class Outage(Callback):
    """Lets the judge fail during the evaluation of `step`."""

    def __init__(self, marker: Path, step: int) -> None:
        self.marker, self.at = marker, step

    def on_step(self, trainer, step):
        if step.step == self.at:
            self.marker.touch()

    def on_evaluation(self, trainer, report):
        self.marker.unlink(missing_ok=True)


def failing_judge(folder: Path) -> tuple[Path, Path]:
    """Return a recipe whose judge fails while a file exists, and that file."""
    marker = folder / "down"
    body = f"**row):\n    import os\n    assert not os.path.exists({str(marker)!r}), 'the service is down'"
    return runs.recipe(folder, reward=runs.REWARD.replace("**row):", body)), marker


@pytest.mark.parametrize("metric", ["data/avg@2", "data/reward/mean"])
def test_a_judge_that_fails_in_one_evaluation_costs_a_mark_and_not_the_run(tmp_path, metric):
    recipe, marker = failing_judge(tmp_path)
    config = Config.load(recipe, ("run.steps=3", "eval.k=2", "eval.every=1", f"eval.best_metric={metric}"))
    result = Trainer(config, quiet=True, callbacks=Outage(marker, 2)).train()
    assert result.steps == 3
    best = checkpoint.best(config.run_dir / "checkpoints")
    assert best is not None and best.metric == metric and best.step in (1, 3)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        (event,) = (event for event in database.events() if "cannot become the best" in event["message"])
    assert (event["kind"], event["step"]) == ("unjudged", 2)
    assert f"has no {metric}, so step 2" in event["message"] and "the service is down" in event["message"]


def test_a_judge_that_fails_before_the_first_step_does_not_prove_the_metric_wrong(tmp_path):
    recipe, marker = failing_judge(tmp_path)
    marker.touch()
    config = Config.load(recipe, ("run.steps=1", "eval.k=2", "eval.best_metric=data/avg@2"))
    assert Trainer(config, quiet=True, callbacks=Outage(marker, -1)).train().steps == 1
    assert checkpoint.best(config.run_dir / "checkpoints")


def test_a_metric_that_the_judge_never_gives_is_refused_before_the_first_step_and_on_a_resume_there(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, **row):\n    return float(len(completion))\n")
    config = Config.load(recipe, ("run.steps=1", "eval.k=2", "eval.best_metric=data/avg@2"))
    for is_resume in (False, True):
        with pytest.raises(ConfigError, match=r"there is no 'data/avg@2'; the metrics are: data/reward/mean, .*"):
            Trainer(config, resume=is_resume, quiet=True).train()
    assert runs.metrics(config.run_dir) == []


def test_a_metric_that_no_evaluation_can_have_is_refused_on_a_resume_too(tmp_path):
    recipe = runs.recipe(tmp_path)
    Trainer(Config.load(recipe, ("run.steps=1", "eval.k=2", "eval.best_metric=data/avg@2/low")), quiet=True).train()
    with pytest.raises(ConfigError, match=r"there is no 'data/avg@2'; the metrics are: .*data/avg@4, "):
        Trainer(Config.load(recipe, ("run.steps=2", "eval.k=4", "eval.best_metric=data/avg@2")), resume=True)


def test_the_best_of_another_metric_does_not_count_after_a_resume_with_a_new_one(tmp_path):
    recipe = runs.recipe(tmp_path)
    lengths, rewards = ("response_length/mean", "reward/mean")
    config = Config.load(recipe, options(tmp_path, "run.steps=1", metric=f"hard/{lengths}"))
    Trainer(config, quiet=True).train()
    old = checkpoint.best(config.run_dir / "checkpoints")
    config = Config.load(recipe, options(tmp_path, "run.steps=2", metric=f"hard/{rewards}"))
    Trainer(config, resume=True, quiet=True).train()
    new = checkpoint.best(config.run_dir / "checkpoints")
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        values = {row["step"]: row["metrics"][rewards] for row in database.evals() if row["name"] == "hard"}
    assert old and new
    assert old.value > max(values.values()), "the test needs a metric with larger values"
    assert (new.metric, new.value) == (f"hard/{rewards}", max(values[1], values[2]))
