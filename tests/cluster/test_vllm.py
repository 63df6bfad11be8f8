"""vLLM in a rollout worker: it samples what the learner beside it learns."""

from __future__ import annotations

import importlib.util

import pytest

from dapo import Trainer
from tests import runs
from tests.cluster.test_runs import assert_accounts_balance
from tests.tiny import save_tiny

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; `make test-cluster` installs its CPU build",
)
def test_a_worker_with_vllm_follows_the_learner_step_by_step(tmp_path, driver):
    save_tiny(tmp_path / "model", hidden_size=128)  # heads of a size that vLLM's kernels know
    rollout = {"n": 4, "engine": "vllm", "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}}
    config = runs.load(tmp_path, "run.steps=3", "cluster.rollout_workers=1", rollout=rollout)
    trainer = Trainer(config)
    try:
        trainer.run()
    finally:
        trainer.close()
    assert_accounts_balance(config.run_dir, steps=3)
    figures = runs.figures(config.run_dir)
    assert all(figure["updates"] > 0 for figure in figures)
    # A sampler that had kept the old weights would differ from the trainer after the first update.
    assert max(figure["logprob_gap/max"] for figure in figures) < 1e-3
