"""Whole runs on a cluster of three nodes: equal to a local run, and no group lost or doubled when processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dapo import Config, CustomParts, Trainer
from dapo.checkpoint import folder as checkpoint
from dapo.errors import ClusterLost, PartError
from dapo.store.database import RunDatabase
from dapo.terminal.console import Reporter
from tests import runs

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent


def train(config: Config, reporter: Reporter | None = None, prepare=lambda trainer: None, **options):
    trainer = Trainer(config, reporter=reporter, **options)
    prepare(trainer)
    try:
        return trainer.train()
    finally:
        trainer.close()


def assert_close(first: Path, second: Path, step: int) -> None:
    """Compare with a tolerance, since several ranks add up in another order than one."""
    one, two = runs.weights(first, step), runs.weights(second, step)
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=0)


def assert_accounts_balance(run_dir: Path, steps: int, n: int = 4) -> None:
    """Check that tokens balance in every step, and that every group is recorded once with all its responses."""
    steps_metrics = runs.metrics(run_dir)
    assert [metrics["step"] for metrics in steps_metrics] == list(range(1, steps + 1))
    for metrics in steps_metrics:
        out = sum(
            value for name, value in metrics.items()
            if name.startswith("tokens/") and name not in ("tokens/carried_in", "tokens/generated", "tokens/computed")
        )  # fmt: skip
        assert metrics["tokens/carried_in"] + metrics["tokens/generated"] == out
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        groups = list(database.groups())
        in_flight = checkpoint.read_state(run_dir / "checkpoints" / f"step_{steps}").sampler.pending
        serials = sorted([*(group["serial"] for group in groups), *in_flight])
        assert serials == list(range(len(serials)))
        for group in groups:
            assert [rollout["sample"] for rollout in database.rollouts(group["serial"])] == list(range(n))


def events(run_dir: Path, kind: str) -> list[str]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [event["message"] for event in database.events() if event["kind"] == kind]


def pid(actor) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def node(actor) -> str:
    return ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))


def once_in_step(trainer: Trainer, step: int, act) -> None:
    """Call `act` when the first responses of this step have arrived and others are in flight."""
    show, done = trainer.sampler.on_progress, []

    def progress(finished: int, total: int) -> None:
        if trainer.step + 1 == step and finished < total and not done:
            done.append(True)
            act()
        show(finished, total)

    trainer.sampler.on_progress = progress


def test_one_worker_gives_the_kept_groups_and_weights_of_a_local_run_bit_for_bit(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", "eval.k=2")
    train(local)
    placed = runs.load(tmp_path, "run.name=placed", "eval.k=2", "cluster.rollout_workers=1")
    train(placed)
    runs.assert_same_run(local.run_dir, placed.run_dir, step=6)
    assert_accounts_balance(placed.run_dir, steps=6)


def test_a_run_survives_the_death_of_a_rollout_worker(tmp_path, driver):
    """Random numbers are keyed by serial, sample and position, so a response sampled again is the same."""
    local = runs.load(tmp_path, "run.name=local")
    train(local)
    config = runs.load(tmp_path, "run.name=killed", "cluster.rollout_workers=2")

    def prepare(trainer):
        victim = pid(trainer.engine.workers[0].actor)
        once_in_step(trainer, 3, lambda: os.kill(victim, signal.SIGKILL))

    train(config, prepare=prepare)
    assert_accounts_balance(config.run_dir, steps=6)
    assert runs.verdicts(config.run_dir) == runs.verdicts(local.run_dir)
    (message,) = events(config.run_dir, "worker")
    assert message.startswith("rollout worker 0 died: its worker process has died; replaced, ")


def test_a_run_survives_the_loss_of_a_node(tmp_path, driver):
    config = runs.load(tmp_path, "run.name=left", "cluster.rollout_workers=2")

    def prepare(trainer):
        home = node(trainer.policy.ranks.workers[0].actor)
        gone = next(
            found for found in driver.worker_nodes
            if found.node_id != home and found.node_id in [node(worker.actor) for worker in trainer.engine.workers]
        )  # fmt: skip
        once_in_step(trainer, 2, lambda: driver.remove_node(gone))

    try:
        train(config, prepare=prepare)
    finally:
        while len(driver.worker_nodes) < 2:
            driver.add_node(num_cpus=2)
    assert_accounts_balance(config.run_dir, steps=6)
    assert "died" in events(config.run_dir, "worker")[0]


def test_in_flight_workers_sample_during_updates_and_no_token_exceeds_max_staleness(tmp_path, driver):
    config = runs.load(tmp_path, "rollout.mode=inflight", "cluster.rollout_workers=2")
    train(config)
    assert_accounts_balance(config.run_dir, steps=6)
    steps_metrics = runs.metrics(config.run_dir)
    assert max(metrics["staleness/max"] for metrics in steps_metrics) == 1
    assert max(metrics["groups/in_flight"] for metrics in steps_metrics) > 0


def test_learners_without_rollout_workers_train_what_one_process_trains(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", "run.steps=3")
    train(local)
    shared = runs.load(tmp_path, "run.name=shared", "run.steps=3", "cluster.learners=2")
    train(shared)
    assert_accounts_balance(shared.run_dir, steps=3)
    assert runs.verdicts(shared.run_dir) == runs.verdicts(local.run_dir)
    assert_close(local.run_dir, shared.run_dir, step=3)


def test_learners_load_a_loss_from_its_file_and_get_a_schedule_as_an_object(tmp_path, driver, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(runs.SEQUENCE_LOSS)
    parts = CustomParts(lr_schedule=lambda step, total: 1 - step / (2 * total))
    for name, learners in (("local", 1), ("shared", 2)):
        overrides = (f"run.name={name}", "run.steps=3", "algorithm.loss=parts.py:loss", f"cluster.learners={learners}")
        train(runs.load(tmp_path, *overrides), parts=parts)
    local, shared = (tmp_path / "runs" / name for name in ("local", "shared"))
    assert [step["lr"] for step in runs.metrics(shared)] == [step["lr"] for step in runs.metrics(local)]
    assert all(step["loss/ratio"] > 0 for step in runs.metrics(shared))
    assert_close(local, shared, step=3)


def test_an_object_that_cannot_be_sent_to_the_learners_is_refused_in_one_sentence(tmp_path, driver):
    lock = threading.Lock()
    parts = CustomParts(lr_schedule=lambda step, total: float(lock.locked()))
    config = runs.load(tmp_path, "cluster.learners=2")
    with pytest.raises(PartError, match=r"cannot be sent to the learners .*; name it as path/to/file.py:function"):
        Trainer(config, parts=parts)


class KillInUpdate(Reporter):
    """Kill the last learner shortly after these updates of a run have begun."""

    def __init__(self, *updates: int) -> None:
        self.updates = updates
        self.begun = 0
        self.trainer: Trainer | None = None

    def phase(self, name: str) -> None:
        if name == "training":
            self.begun += 1
            if self.begun in self.updates:
                threading.Timer(
                    0.005, os.kill, (pid(self.trainer.policy.ranks.workers[-1].actor), signal.SIGKILL)
                ).start()


def test_a_learner_killed_during_an_update_returns_the_run_to_its_start_or_newest_checkpoint(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local")
    train(local)
    config = runs.load(tmp_path, "run.name=killed", "cluster.learners=2", "cluster.rollout_workers=1")
    reporter = KillInUpdate(2, 2 + 5)  # in step 2, and after the restart in step 5
    train(config, reporter, lambda trainer: setattr(reporter, "trainer", trainer))
    assert_accounts_balance(config.run_dir, steps=6)
    assert [message.split(",")[0] for message in events(config.run_dir, "learners")] == [
        "learner 1 died: its worker process has died; all learners start again from step 0",
        "learner 1 died: its worker process has died; all learners start again from step 3",
    ]
    assert [message.split(":")[0] for message in events(config.run_dir, "resumed")] == [
        "resumed from step 0",
        "resumed from step 3",
    ]
    assert runs.verdicts(config.run_dir) == runs.verdicts(local.run_dir)
    assert_close(local.run_dir, config.run_dir, step=6)


def test_a_learner_killed_again_during_the_restart_costs_only_another_restart(tmp_path, driver):
    config = runs.load(tmp_path, "run.name=again", "run.save_every=1", "run.steps=3", "cluster.rollout_workers=1")
    reporter = KillInUpdate(2)

    def prepare(trainer):
        reporter.trainer, restore, killed = trainer, trainer.policy.restore, []

        def restore_or_die(folder):
            if not killed:
                killed.append(pid(trainer.policy.ranks.workers[0].actor))
                os.kill(killed[0], signal.SIGKILL)
            restore(folder)

        trainer.policy.restore = restore_or_die

    train(config, reporter, prepare)
    assert_accounts_balance(config.run_dir, steps=3)
    died = "learner 0 died: its worker process has died"
    assert events(config.run_dir, "learners") == [
        f"{died}; {died} during the restart; all learners start again from step 1, 0 steps undone"
    ]


def test_a_cluster_lost_while_weights_are_sent_saves_the_step_that_made_them(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", "run.save_every=0", "run.steps=3")
    train(local)
    options = ["run.name=lost", "run.save_every=0", "run.steps=3", "cluster.rollout_workers=1"]
    config = runs.load(tmp_path, *options, "cluster.max_restarts=0")

    class KillInSecondUpdate(Reporter):
        def phase(self, name: str) -> None:
            if name == "training" and trainer.step == 1:
                trainer.engine.broadcast = lambda actors, version: None
                os.kill(pid(trainer.engine.workers[0].actor), signal.SIGKILL)

    trainer = Trainer(config, reporter=KillInSecondUpdate())
    with pytest.raises(ClusterLost, match=r"^rollout worker 0 died"):
        trainer.train()
    assert checkpoint.steps(config.run_dir / "checkpoints") == [2]
    train(config, resume=True)
    one, two = runs.weights(local.run_dir, 3), runs.weights(config.run_dir, 3)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert runs.verdicts(local.run_dir) == runs.verdicts(config.run_dir)


def test_without_restarts_left_the_run_saves_the_last_whole_step_and_can_resume(tmp_path, driver):
    options = ["run.name=lost", "cluster.rollout_workers=1", "run.save_every=0"]
    config = runs.load(tmp_path, *options, "cluster.max_restarts=0")

    def prepare(trainer):
        victim = pid(trainer.engine.workers[0].actor)
        once_in_step(trainer, 4, lambda: os.kill(victim, signal.SIGKILL))

    with pytest.raises(ClusterLost, match=r"more processes than cluster\.max_restarts = 0 allows$"):
        train(config, prepare=prepare)
    assert (config.run_dir / "checkpoints" / "step_3").is_dir()
    local = runs.load(tmp_path, "run.name=local", "run.save_every=0")
    train(local)
    trainer = Trainer(runs.load(tmp_path, *options, "cluster.max_restarts=0"), resume=True)
    trainer.train()
    runs.assert_same_run(local.run_dir, config.run_dir, step=6)
    embedding = runs.weights(config.run_dir, 6)["model.embed_tokens.weight"]
    assert torch.equal(trainer.model.get_input_embeddings().weight, embedding), "loaded from the newest checkpoint"


def test_a_run_whose_driver_was_killed_resumes(tmp_path, cluster):
    """The reward function kills the driver from its worker process in step 5, once."""
    deadly = runs.deadly_reward(tmp_path / "killed")
    local = runs.load(tmp_path, "run.name=local")
    train(local)
    recipe = runs.recipe(tmp_path, reward=deadly)
    command = [sys.executable, "-m", "dapo", "train", str(recipe), "run.name=killed", "reward.workers=1"]
    command.append("cluster.rollout_workers=1")
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    dead = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    again = subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    killed = local.run_dir.parent / "killed"
    runs.assert_same_run(local.run_dir, killed, step=6)
    assert_accounts_balance(killed, steps=6)
