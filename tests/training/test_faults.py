"""Lost learners and clusters. The policy of this process is lost and restarted as learners on a cluster are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dapo import Trainer
from dapo.checkpoint import folder as checkpoint
from dapo.errors import ClusterLost, LearnerLost
from dapo.store.database import RunDatabase
from tests import runs
from tests.runs import assert_same_run
from tests.training.test_trainer import train


class Losses:
    """Lets calls of a trainer's policy fail after their work is done, and restarts the policy from a checkpoint."""

    def __init__(self, trainer: Trainer, limit: int = 9) -> None:
        self.policy, self.limit, self.restarts = trainer.policy, limit, []
        self.start = Path(trainer.config.model.path)
        trainer.parts = replace(trainer.parts, restart=self.restart)

    def lose(self, name: str, *calls: int) -> None:
        """Lose the learner in these calls of a method, counted from 1."""
        method, made = getattr(self.policy, name), []

        def losing(*arguments):
            made.append(name)
            answer = method(*arguments)
            if len(made) in calls:
                raise LearnerLost(f"learner 0 died in {name} {len(made)}")
            return answer

        setattr(self.policy, name, losing)

    def restart(self, lost, saved):
        self.restarts.append(saved and saved.name)
        if len(self.restarts) > self.limit:
            raise ClusterLost(f"{lost}; too many losses")
        self.policy.causal_lm.load_state_dict(runs.weights_of(saved or self.start), strict=False)
        self.policy.optimizer.adam.state.clear()


def events(config, kind):
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        return [event["message"] for event in database.events() if event["kind"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a recipe, and an undisturbed run of it called `whole`."""
    folder = tmp_path_factory.mktemp("faults")
    train(runs.load(folder, "run.name=whole"))
    return folder


def assert_as_undisturbed(config) -> None:
    assert_same_run(config.run_dir.parent / "whole", config.run_dir, step=6)


def test_a_learner_lost_again_during_the_restart_costs_only_another_restart(folder):
    config = runs.load(folder, "run.name=again")
    trainer = Trainer(config)
    losses = Losses(trainer)
    losses.lose("update", 2, 7)  # in step 2; then step 1 is update 3, and step 5 update 7
    losses.lose("restore", 1)  # in the restart from the checkpoint of step 3
    result = trainer.train()
    assert_as_undisturbed(config)
    assert losses.restarts == [None, "step_3", "step_3"]
    assert events(config, "learners") == [
        "learner 0 died in update 2; all learners start again from step 0, 1 step undone",
        "learner 0 died in update 7; learner 0 died in restore 1 during the restart; all learners start again from "
        "step 3, 1 step undone",
    ]
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        assert result.seconds == pytest.approx(database.total("timing_s/step")), "the undone steps do not count"


def test_too_many_losses_during_the_restart_end_the_run_which_can_resume(folder):
    config = runs.load(folder, "run.name=many")
    trainer = Trainer(config)
    losses = Losses(trainer, limit=2)
    losses.lose("update", 5)
    losses.lose("restore", 1, 2, 3)
    with pytest.raises(ClusterLost, match=r"learner 0 died in restore 2 during the restart; too many losses$"):
        trainer.train()
    assert events(config, "stopped")[0].endswith("too many losses")
    train(config, resume=True)
    assert_as_undisturbed(config)


def test_no_group_in_flight_passes_from_undone_weights_to_those_of_the_checkpoint(tmp_path):
    options = ("rollout.mode=inflight", "rollout.max_concurrent=6", "data.max_response_length=12", "optim.lr=1e-2")
    config = runs.load(tmp_path, *options, "run.steps=7")
    trainer = Trainer(config)
    losses, in_flight = Losses(trainer), []
    losses.lose("update", 6)  # in step 6, which returns to step 3
    restart = losses.restart
    trainer.parts = replace(
        trainer.parts, restart=lambda *given: (in_flight.append(len(trainer.engine.active)), restart(*given))
    )
    trainer.train()
    assert in_flight[0] > 0
    steps = runs.metrics(config.run_dir)
    assert [step["step"] for step in steps] == list(range(1, 8))
    assert max(step.get("logprob_gap/max", 0.0) for step in steps) < 1e-4


def test_a_cluster_lost_after_an_update_saves_no_checkpoint_with_the_weights_of_another_step(folder):
    config = runs.load(folder, "run.name=update")
    trainer = Trainer(config)
    sync = trainer.engine.sync_weights

    def lose(version):
        if version == 5:
            raise ClusterLost("all rollout workers are gone")
        sync(version)

    trainer.engine.sync_weights = lose
    with pytest.raises(ClusterLost):
        trainer.train()
    assert checkpoint.steps(config.run_dir / "checkpoints") == [3]
    assert events(config, "stopped") == ["all rollout workers are gone"]
    train(config, resume=True)
    assert_as_undisturbed(config)
