"""A real model on three nodes: with two learners, two rollout workers and a placed judge, the reward rises."""

from __future__ import annotations

import importlib.util
import sqlite3
from pathlib import Path

import pytest

from dapo import Config, Trainer
from tests.cluster.test_runs import assert_accounts_balance

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent
# With vLLM if it is installed (`make test-cluster` does): a small cache, and no compilation.
VLLM = [
    "cluster.rollout_workers={vllm: 1, embedded: 1}",
    "rollout.vllm={enforce_eager: true, kv_cache_memory_bytes: 268435456}",
]
WORKERS = VLLM if importlib.util.find_spec("vllm") else ["cluster.rollout_workers=2"]


def shape(path: Path) -> list[tuple[str, str]]:
    """Return the SQL of every table."""
    with sqlite3.connect(path) as database:
        return database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


def train(config: Config):
    trainer = Trainer(config)
    try:
        return trainer.train()
    finally:
        trainer.close()


def test_smollm2_learns_to_answer_five_on_three_nodes(tmp_path, smollm2_dir, driver, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = [f"model.path={smollm2_dir}", f"run.dir={tmp_path}", "model.device=cpu"]
    cluster = ["cluster.learners=2", *WORKERS, "cluster.reward_workers=1"]
    result = train(Config.load("recipes/guess_five.yaml", [*options, *cluster, "run.steps=5", "eval.k=8"]))
    (before,), (after,) = result.before, result.after
    assert_accounts_balance(result.run_dir, steps=5, n=8)
    assert after.metrics["reward/mean"] > before.metrics["reward/mean"] + 0.2
    local = train(Config.load("recipes/guess_five.yaml", [*options, "run.name=local", "run.steps=1", "eval.k=0"]))
    assert shape(result.run_dir / "run.db") == shape(local.run_dir / "run.db")
