"""Compare the announced disk space of a run with the space that it takes."""

from __future__ import annotations

import pytest

from dapo.plan.dry_run import planned_checkpoint
from dapo.plan.shapes import find_shape
from dapo.store.database import RunDatabase
from dapo.training.disk import step_bytes
from dapo.training.trainer import Trainer
from tests import runs


@pytest.mark.parametrize("options", [(), ("model.dtype=bfloat16", "run.store_tokens=all")])
def test_the_sizes_that_are_announced_are_those_that_are_written(tmp_path, options):
    # Groups are half kept and responses as long as allowed, as the estimate assumes.
    config = runs.load(tmp_path, "run.steps=6", "data.max_response_length=64", *options)
    trainer = Trainer(config)
    announced = trainer.policy.checkpoint_bytes
    shape = find_shape(config.model.path)
    assert shape is not None
    assert planned_checkpoint(config, shape) == pytest.approx(announced, rel=0.02)
    trainer.train()
    files = (config.run_dir / "checkpoints" / "step_6").rglob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(announced, rel=0.05)
    growth = (config.run_dir / "run.db").stat().st_size / 6
    assert 0.3 < growth / step_bytes(config) < 3
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        (message,) = (event["message"] for event in database.events() if event["kind"] == "plan")
    assert message.startswith(
        f"a checkpoint takes {announced / 1000:.0f} kB (the 2 newest are kept), a step up to about "
    )
    assert message.endswith(f" are free in {tmp_path}/runs")
