"""The process that trains runs in turn: what it compiles before a run, so that seconds can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.ablation import worker
from dapo.ablation.task import Task
from tests.ablation.recipes import plan_of, write_recipe


def test_the_kernels_of_each_model_are_compiled_before_its_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arms = ["adapters: model.lora.rank=4", "hot: optim.lr=0.1", "typed: model.dtype=bfloat16"]
    plan = plan_of(write_recipe(tmp_path), *arms, seeds=2)
    done: list[str] = []
    monkeypatch.setattr(worker, "_compiles_here", lambda config: True)
    monkeypatch.setattr(worker, "_warm_up", lambda task: done.append("warm-up"))
    monkeypatch.setattr(worker, "_train", lambda task, send: done.append(task.config.run.name))
    warm = []
    for run in plan.runs:
        task = Task(run.config, plan.budget, plan.recipe, False, None, False, "quiet")
        assert worker._outcome(task, lambda news: None, warm).failure is None
    assert done == [
        "warm-up", "recipe-s5", "warm-up", "adapters-s5", "hot-s5", "warm-up", "typed-s5",
        "recipe-s6", "adapters-s6", "hot-s6", "typed-s6",
    ]  # fmt: skip
