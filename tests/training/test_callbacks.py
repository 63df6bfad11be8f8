"""Test callbacks: which events they get, and that a run which one of them breaks is saved and can resume."""

from __future__ import annotations

import threading

import pytest
import torch

from dapo import Callback
from dapo.errors import ConfigError
from dapo.store.database import RunDatabase
from dapo.types import Verdict
from tests import runs

EVALUATED = {"eval.k": 1, "eval.every": 2}


class Log(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []
        self.groups: list[Verdict] = []

    def on_group(self, trainer, group):
        self.groups.append(group.verdict)

    def on_step(self, trainer, step):
        assert trainer.step == step.step
        self.seen.append(("step", step.step))

    def on_evaluation(self, trainer, report):
        self.seen.append(("evaluation", (report.step, report.name)))

    def on_save(self, trainer, checkpoint):
        assert (checkpoint / "model.safetensors").is_file()
        self.seen.append(("save", checkpoint.name))

    def on_end(self, trainer, result):
        trainer.model  # noqa: B018  # it is usable
        self.seen.append(("end", result.steps))


class Patient(Callback):
    """Waits while a checkpoint is written, so that it is reported in the same step on every machine."""

    def on_group(self, trainer, group):
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()


def test_every_event_is_reported_in_order(make, tmp_path):
    log, steps = Log(), []
    make(EVALUATED, callbacks=[Patient(), log, lambda trainer, step: steps.append(step.step)]).train()
    assert log.seen == [
        ("evaluation", (0, "train_dataset")),
        ("step", 1),
        ("step", 2),
        ("evaluation", (2, "train_dataset")),
        ("save", "step_2"),
        ("step", 3),
        ("step", 4),
        ("evaluation", (4, "train_dataset")),
        ("save", "step_4"),
        ("end", 4),
    ]
    assert steps == [1, 2, 3, 4]
    with RunDatabase.open_readonly(tmp_path / "run" / "run.db") as database:
        assert len(log.groups) == len([*database.groups()])


@pytest.mark.parametrize("mode", ["strict", "inflight"])
def test_stop_ends_the_run_after_its_step_evaluated_and_saved_as_configured(make, tmp_path, mode):
    log = Log()

    def stop(trainer, step):
        if step.step == 2:
            trainer.stop()

    trainer = make({**EVALUATED, "run.save_every": 0, "rollout.mode": mode}, callbacks=[stop, log])
    result = trainer.train()
    assert result.steps == 2
    assert [report.step for report in result.after] == [2]
    assert log.seen[-3:] == [("evaluation", (2, "train_dataset")), ("save", "step_2"), ("end", 2)]
    assert trainer.train().steps == 4


def test_a_run_that_stops_before_an_evaluation_has_no_result_after_it(make):
    result = make({"eval.k": 1}, callbacks=lambda trainer, step: trainer.stop()).train()
    assert [report.step for report in result.before] == [0]
    assert result.after == ()
    assert "after" not in repr(result)


@pytest.mark.parametrize("function", [lambda trainer: None, lambda trainer, step, more: None])
def test_a_function_with_other_arguments_is_refused_at_once(make, function):
    with pytest.raises(ConfigError, match=r"callbacks: <lambda> must take two arguments, \(trainer, step\)"):
        make(callbacks=function)


class Broken(Callback):
    """Raises at the n-th call of one event."""

    def __init__(self, event: str, count: int) -> None:
        self.left = count
        setattr(self, event, self._count)

    def _count(self, trainer, about):
        self.left -= 1
        if self.left == 0:
            raise ValueError("mine")


@pytest.mark.parametrize(
    ("event", "count"), [("on_group", 30), ("on_step", 3), ("on_evaluation", 2), ("on_save", 1), ("on_end", 1)]
)
def test_an_exception_in_a_callback_ends_the_run_saved_and_a_resume_is_the_same_run(
    make, tmp_path, whole_run, event, count
):
    trainer = make({**EVALUATED, "run.save_every": 2}, callbacks=[Patient(), Broken(event, count)])
    with pytest.raises(ValueError, match="mine"):
        trainer.train()
    run, steps = tmp_path / "run", trainer.step
    assert steps > 0
    assert (run / "checkpoints" / f"step_{steps}").is_dir()
    with RunDatabase.open_readonly(run / "run.db") as database:
        last = [event["message"] for event in database.events()][-1]
    if event == "on_end":
        assert last == "after step 4"
    else:
        assert last == "a callback raised ValueError: mine"
        trainer.callbacks.members.clear()
        assert [report.step for report in trainer.steps()] == [*range(steps + 1, 5)], "nothing trained is lost"
    one, two = runs.weights(whole_run, 4), runs.weights(run, 4)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert runs.metrics(whole_run) == runs.metrics(run)
