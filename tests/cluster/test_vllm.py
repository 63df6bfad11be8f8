"""vLLM in a rollout worker: it follows the learners' weights, works with other engines, and is replaced if it dies."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections import Counter

import pytest

from dapo import Config
from dapo.errors import TrainingStopped
from dapo.evaluation.compare import evaluate_models
from tests import runs
from tests.cluster.test_runs import assert_accounts_balance, events, once_in_step, train
from tests.saved import SavedRun
from tests.tiny import save_tiny

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; `make test-cluster` installs its CPU build",
)

VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


def load(tmp_path, *overrides: str) -> Config:
    save_tiny(tmp_path / "model", hidden_size=128)  # a head size that vLLM's kernels support
    return runs.load(tmp_path, *overrides, rollout={"n": 4, "vllm": VLLM})


def assert_follows(config: Config, steps: int) -> None:
    """Check that sampler and trainer agree. With old weights the sampler would differ after the first update."""
    assert_accounts_balance(config.run_dir, steps)
    steps_metrics = runs.metrics(config.run_dir)
    assert all(metrics["updates"] > 0 for metrics in steps_metrics)
    # A step whose first mini-batch has only carried-over groups has no gap to measure.
    gaps = [metrics["logprob_gap/max"] for metrics in steps_metrics if "logprob_gap/max" in metrics]
    assert len(gaps) > steps / 2 and max(gaps) < 1e-3


def test_a_worker_with_vllm_follows_the_learner_step_by_step(tmp_path, driver):
    config = load(tmp_path, "run.steps=3", "rollout.engine=vllm", "cluster.rollout_workers=1")
    train(config)
    assert_follows(config, steps=3)


def test_a_run_that_its_gap_to_vllm_would_stop_trains_on_with_the_default_correction(tmp_path, driver):
    """In bf16 vLLM rounds differently from the trainer, by more than this limit."""
    options = ["rollout.engine=vllm", "cluster.rollout_workers=1", "model.dtype=bfloat16"]
    # Weights that have changed since would make the correction larger, so no group is carried over.
    options += ["run.steps=3", "algorithm.max_logprob_gap=0.005", "algorithm.max_staleness=0"]
    stopped = load(tmp_path, *options, "run.name=stopped", "algorithm.importance_correction=none")
    with pytest.raises(TrainingStopped, match=r"max_logprob_gap.*algorithm.importance_correction can correct for it"):
        train(stopped)
    assert [metrics["updates"] for metrics in runs.metrics(stopped.run_dir)] == [0]
    corrected = load(tmp_path, *options, "run.name=corrected")
    train(corrected)
    assert_accounts_balance(corrected.run_dir, steps=3)
    for metrics in runs.metrics(corrected.run_dir):
        assert metrics["updates"] > 0
        assert metrics["logprob_gap/mean"] > 0.005
        assert metrics["correction/weight"] == pytest.approx(1, abs=0.05)
        assert metrics["correction/weight"] != 1  # the sampler really differs
        assert 0 <= metrics["correction/truncated"] < 0.1


@pytest.fixture
def larger(driver):
    """The cluster with one more node."""
    extra = driver.add_node(num_cpus=2)
    yield driver
    driver.remove_node(extra)


def test_vllm_and_embedded_engines_sample_side_by_side_for_two_learners_and_a_placed_judge(tmp_path, larger):
    workers = ["cluster.learners=2", "cluster.rollout_workers={vllm: 1, embedded: 2}", "cluster.reward_workers=1"]
    config = load(tmp_path, "run.steps=4", "eval.k=2", *workers)
    came_from: Counter[int] = Counter()

    def prepare(trainer):
        deliver = trainer.engine._deliver

        def counting(worker, rollouts):
            came_from[worker.slot] += len(rollouts)
            deliver(worker, rollouts)

        trainer.engine._deliver = counting

    train(config, prepare=prepare)
    assert_follows(config, steps=4)
    assert came_from.keys() == {0, 1, 2}
    assert min(came_from.values()) > 0


def vllm_processes(actor) -> list[int]:
    return ray.get(actor.__ray_call__.remote(lambda self: [process.pid for process in self.engine.processes]))


def test_vllm_killed_while_sampling_is_replaced_and_the_run_completes(tmp_path, driver):
    """vLLM's processes die; the worker around them lives and reports the failure."""
    config = load(tmp_path, "run.steps=4", "rollout.engine=vllm", "cluster.rollout_workers=1")

    def prepare(trainer):
        victims = vllm_processes(trainer.engine.workers[0].actor)
        once_in_step(trainer, 3, lambda: [os.kill(victim, signal.SIGKILL) for victim in victims])

    train(config, prepare=prepare)
    assert_follows(config, steps=4)
    (message,) = events(config.run_dir, "worker")
    assert message.startswith("rollout worker 0 failed: vLLM ended or failed while it was sampling (")
    assert "); replaced, " in message


def test_a_worker_with_vllm_evaluates_two_checkpoints_as_the_embedded_engine_does(tmp_path, driver):
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(4)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    saved = SavedRun(
        tmp_path,
        shape={"hidden_size": 128},
        data={"train": "gone.jsonl", "max_prompt_length": 64, "max_response_length": 8},
        rollout={"vllm": VLLM},
        cluster={"rollout_workers": {"vllm": 1}},
        reward={"use": "exact", "workers": 1},
        eval={"k": 2, "data": str(tmp_path / "questions.jsonl"), "temperature": 0.0},
    )
    saved.save(1)
    saved.move()
    saved.save(4)
    here = ["cluster.rollout_workers=0", "rollout.vllm={}"]
    placed, local = (
        evaluate_models([f"{saved.path}@1", f"{saved.path}@4"], options, out=tmp_path / name).results["questions"]
        for name, options in (("placed", ()), ("local", here))
    )
    for one, two in zip(placed, local, strict=True):
        assert [s.rollout.text for s in one.report.samples] == [s.rollout.text for s in two.report.samples]
