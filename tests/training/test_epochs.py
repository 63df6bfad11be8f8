"""Runs whose length is given in passes over the data."""

from __future__ import annotations

import pytest
import torch

from dapo.config import Config
from dapo.errors import CheckpointError
from dapo.training.trainer import Trainer
from tests import runs


@pytest.mark.parametrize("options", [(), ("algorithm.ledger.enable=true",), ("rollout.mode=inflight",)])
def test_a_run_of_epochs_ends_after_the_step_that_completes_them_and_resumes_exactly(tmp_path, options):
    recipe = runs.recipe(tmp_path)
    epochs = ("run.steps=null", "run.save_every=1", *options)
    whole = Config.load(recipe, (*epochs, "run.epochs=4", "run.name=whole"))
    parts = Config.load(recipe, (*epochs, "run.epochs=1.5", "run.name=parts"))
    longer = Config.load(recipe, (*epochs, "run.epochs=4", "run.name=parts"))
    result = Trainer(whole).train()
    drawn = [step["epoch"] for step in runs.metrics(whole.run_dir)]
    assert drawn[-2] < 4 <= drawn[-1]
    first = Trainer(parts).train()
    assert 0 < first.steps < result.steps
    with pytest.raises(CheckpointError, match=r"has already finished .* epochs; raise run\.epochs to continue"):
        Trainer(parts, resume=True)
    assert Trainer(longer, resume=True).train().steps == result.steps
    assert runs.metrics(longer.run_dir) == runs.metrics(whole.run_dir)
    found, expected = (runs.weights(config.run_dir, result.steps) for config in (longer, whole))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
