"""Restoring from a checkpoint: which faults are the checkpoint's own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.weights import OPTIMIZER
from dapo.errors import CheckpointError, LearnerLost, ModelError, StorageError
from tests.saved import SavedRun


@pytest.fixture
def saved(tmp_path) -> SavedRun:
    run = SavedRun(tmp_path)
    for master in run.policy.optimizer.masters:
        master.grad = torch.ones_like(master)
    run.policy.optimizer.step(1e-3)  # before it, AdamW has no moments
    run.save(1)
    return run


def lose_a_learner(folder):
    raise LearnerLost("learner 1 died: its worker process has died")


def use_up_the_memory(folder):
    torch.empty(2**60)


def use_up_the_gpu(folder):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("fault", [lose_a_learner, use_up_the_memory])
def test_a_fault_of_the_machine_is_not_blamed_on_the_checkpoint(saved, monkeypatch, fault):
    monkeypatch.setattr(saved.policy, "restore", fault)
    with pytest.raises(RuntimeError) as caught:
        checkpoint.restore(saved.folder / "step_1", saved.policy)
    assert not isinstance(caught.value, CheckpointError)


def test_too_little_gpu_memory_to_restore_is_one_sentence_that_says_what_to_do(saved, monkeypatch):
    monkeypatch.setattr(saved.policy, "restore", use_up_the_gpu)
    with pytest.raises(ModelError, match=r"step_1: .* lower rollout.kv_memory_fraction, then run dapo resume .*/run$"):
        checkpoint.restore(saved.folder / "step_1", saved.policy)


@pytest.mark.parametrize("fault", ["shape", "missing", "not safetensors"])
def test_an_optimizer_state_that_does_not_fit_is_a_damaged_checkpoint(saved, fault):
    checkpoint.restore(saved.folder / "step_1", saved.policy)
    file = saved.folder / "step_1" / OPTIMIZER
    state = load_file(file)
    name = next(name for name in state if name.startswith("exp_avg/"))
    if fault == "shape":
        state[name] = state[name][:-1].clone()
    else:
        del state[name]
    save_file(state, file)
    if fault == "not safetensors":
        file.write_bytes(b"no header")
    with pytest.raises(
        CheckpointError, match=r"step_1: the checkpoint is damaged \(the optimizer's state does not fit"
    ):
        checkpoint.restore(saved.folder / "step_1", saved.policy)


def test_a_checkpoint_that_could_not_be_replaced_stays(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in (saved.folder / "step_1").iterdir() if path.is_file()}
    rename, made = Path.rename, []

    def fail_second(path, target):
        made.append(target)
        if len(made) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(StorageError, match="Input/output error"):
        saved.save(1)  # again, as after a late evaluation
    monkeypatch.undo()
    assert [path.name for path in saved.folder.iterdir()] == ["step_1"]
    assert {path.name: path.read_bytes() for path in (saved.folder / "step_1").iterdir() if path.is_file()} == before
