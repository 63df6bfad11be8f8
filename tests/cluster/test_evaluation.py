"""`dapo eval` on a cluster: the samples of rollout workers are those of one process, and engines are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dapo.errors import ClusterError
from dapo.evaluation import parts as shared
from dapo.evaluation.compare import evaluate_models
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.subjects import resolve
from dapo.types import Prompt, SamplingParams
from tests.saved import SavedRun

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent
HERE = ["cluster.rollout_workers=0", "cluster.reward_workers=0", "cluster.learners=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two rollout workers and a reward worker, with checkpoints of steps 1 and 4."""
    folder = tmp_path_factory.mktemp("placed")
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text("def reward(completion, answer):\n    return sum(map(ord, completion)) % 3\n")
    saved = SavedRun(
        folder,
        data={"train": "gone.jsonl", "max_prompt_length": 64, "max_response_length": 6},
        reward={"use": f"{folder / 'reward.py'}:reward", "workers": 1},
        cluster={"rollout_workers": 2, "reward_workers": 1},
        eval={"k": 3, "data": str(folder / "questions.jsonl")},
    )
    saved.save(1)
    saved.move()
    saved.save(4)
    return saved


@pytest.fixture
def built(monkeypatch):
    """The number of rollout workers of each engine that is built while the test runs."""
    workers, build = [], shared.assemble_samplers

    def assemble(*arguments):
        engine, judge = build(*arguments)
        workers.append(len(getattr(engine, "workers", ())))  # none if it samples in this process
        return engine, judge

    monkeypatch.setattr(shared, "assemble_samplers", assemble)
    return workers


def samples(found) -> list[list[tuple]]:
    (results,) = found.results.values()
    return [[(s.prompt.uid, s.rollout.tokens.tolist(), s.score.value) for s in r.report.samples] for r in results]


def test_two_checkpoints_are_sampled_and_judged_by_one_set_of_workers_as_in_one_process(run, driver, built, tmp_path):
    models = [f"{run.path}@1", f"{run.path}@4"]
    placed = samples(evaluate_models(models, out=tmp_path / "placed"))
    assert built == [2]
    assert placed == samples(evaluate_models(models, HERE, out=tmp_path / "here"))
    assert placed[0] != placed[1]
    assert ray.cluster_resources() == ray.available_resources(), "all resources are free again"


def test_learners_that_sampled_themselves_become_rollout_workers(run, driver, built, tmp_path):
    options = ["cluster.rollout_workers=0", "cluster.reward_workers=0", "cluster.learners=2"]
    placed = samples(evaluate_models([f"{run.path}@4"], options, out=tmp_path / "placed"))
    assert built == [2]
    assert placed == samples(evaluate_models([f"{run.path}@4"], HERE, out=tmp_path / "here"))


def test_a_worker_that_dies_is_replaced_by_one_with_the_weights_of_the_newest_model(run, driver):
    prompts = [Prompt(f"p{i}", ({"role": "user", "content": "?"},), (1, 5 + i, 9), 1) for i in range(6)]

    def sample(parts: shared.SharedParts, config) -> list[list[int]]:
        report = evaluate(*parts.open(config), prompts, 2, SamplingParams(max_tokens=6), 0, "set")
        return [sample.rollout.tokens.tolist() for sample in report.samples]

    first, second = (subject.config for subject in resolve([f"{run.path}@1", f"{run.path}@4"]))
    events = []
    with closing(shared.SharedParts(lambda kind, message: events.append(message))) as parts:
        sample(parts, first)
        before = sample(parts, second)
        victim = parts.parts[0].workers[0].actor
        os.kill(ray.get(victim.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        assert sample(parts, second.model_copy(update={"run": first.run})) == before
    (message,) = events
    assert message.startswith("rollout worker 0 died")


def test_the_command_joins_the_cluster_of_its_address(run, cluster, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "dapo", "eval", str(run.path), "--out", str(tmp_path / "out")],
        cwd=ROOT, env=environment | {"RAY_ADDRESS": cluster.address}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "questions: 6 questions x 3 samples" in done.stdout


@pytest.mark.parametrize(
    ("options", "address", "sentence"),
    [
        ([], "127.0.0.1:1", "RAY_ADDRESS is 127.0.0.1:1, but nothing answers there"),
        (["rollout_workers=4000"], "", "cluster.rollout_workers = 4000 and cluster.reward_workers = 1 need 4001 CPU"),
        (["rollout_workers=4000", "reward_workers=0"], "", "cluster.rollout_workers = 4000 need 4000 CPU"),
    ],
)
def test_a_cluster_that_is_gone_or_too_small_is_one_sentence_and_leaves_no_files(
    run, tmp_path, monkeypatch, options, address, sentence
):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match=f"^{sentence}") as refusal:
        evaluate_models([str(run.path)], [f"cluster.{option}" for option in options], out=tmp_path / "out")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()
