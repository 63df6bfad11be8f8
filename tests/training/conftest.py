"""A small trainer with rows and a reward in memory, and the run that it makes if nothing disturbs it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from dapo import Trainer
from tests.tiny import save_tiny

ROWS = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]


def reward(completion, answer):
    letters = sum(character.isalpha() for character in completion)
    return {"score": letters / 8 if len(completion) > 2 else 0.0, "acc": letters % 5 == answer % 2}


def make_trainer(folder: Path, model: Path, config: dict | None = None, **arguments) -> Trainer:
    """Return a trainer in `folder` with small options, which `config` replaces."""
    data = {"train_batch_size": 4, "gen_batch_size": 6, "max_prompt_length": 64, "max_response_length": 8}
    options = {
        "run": {"dir": folder, "steps": 4, "save_every": 2, "seed": 5},
        "model.device": "cpu",
        "data": data,
        "rollout.n": 4,
        "optim": {"lr": 1e-3, "warmup_steps": 2, "ppo_mini_batch_size": 2},
        **(config or {}),
    }
    given = {"model": model, "train_dataset": ROWS, "reward_funcs": reward, "quiet": True, **arguments}
    return Trainer(options, **given)


def is_unlocked(run_dir: Path) -> bool:
    """Return whether no process holds the lock of a run."""
    with (run_dir / ".lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, tiny_model) -> Path:
    """The directory of an undisturbed run."""
    return make_trainer(tmp_path_factory.mktemp("whole"), tiny_model).train().run_dir


@pytest.fixture
def make(tmp_path, tiny_model):
    """Return `make_trainer` for this test's folder."""
    return lambda config=None, **arguments: make_trainer(tmp_path, tiny_model, config, **arguments)
