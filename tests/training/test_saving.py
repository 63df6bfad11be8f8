"""Test checkpoints that are written while the run trains on: what they hold, and every way in which that can end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dapo import Callback
from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint import host
from dapo.checkpoint.host import HostMemory
from dapo.errors import StorageError
from dapo.model import lora
from dapo.sampling.strict import DynamicSampler
from dapo.store.database import RunDatabase
from dapo.system.tensors import write_tensors
from tests import runs
from tests.training.conftest import is_unlocked

ROOT = Path(__file__).parent.parent.parent
EVERY_STEP = {"run.save_every": 1}


class SlowDisk:
    """Holds up every tensor file of step `step` and later ones until `goes_on` is set."""

    def __init__(self, monkeypatch, step: int) -> None:
        self.goes_on, self.step, self.largest = threading.Event(), step, 0
        monkeypatch.setattr(checkpoint, "write_tensors", self.write)

    def write(self, path, tensors, before_piece):
        self.largest = max(self.largest, len(writers()))
        step = next(int(part.removeprefix("step_")) for part in path.parts if part.startswith("step_"))
        while step >= self.step and not self.goes_on.is_set():
            before_piece()
            time.sleep(0.002)
        return write_tensors(path, tensors, before_piece)


class At(Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, function) -> None:
        self.step, self.function = step, function

    def on_step(self, trainer, step):
        if step.step == self.step:
            self.function()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def kinds(run: Path) -> list[tuple[str, str]]:
    with RunDatabase.open_readonly(run / "run.db") as database:
        return [(event["kind"], event["message"]) for event in database.events()]


def test_a_checkpoint_holds_the_weights_of_its_step_although_the_run_trained_on(make, tmp_path, monkeypatch, whole_run):
    disk, run = SlowDisk(monkeypatch, step=2), tmp_path / "run"
    held = []

    def while_writing():
        held.extend((len(writers()), checkpoint.steps(run / "checkpoints")))
        disk.goes_on.set()

    make(callbacks=At(3, while_writing)).train()
    assert held == [1, []], "step 3 was trained while step 2 was being written"
    names = ["model.safetensors", "trainer/optimizer.safetensors", "trainer/SHA256SUMS", "tokenizer.json"]
    for name in names:
        one, two = (place / "checkpoints" / "step_2" / name for place in (whole_run, run))
        assert one.read_bytes() == two.read_bytes(), name
    runs.assert_same_run(whole_run, run, step=4)


def test_the_next_step_samples_during_the_copy_and_updates_after_it(make, tmp_path, monkeypatch, whole_run):
    is_sampled, copy, fill = threading.Event(), HostMemory.copy, DynamicSampler.fill

    def copy_late(memory, files):
        assert is_sampled.wait(timeout=60), "the next step did not sample before the end of the copy"
        time.sleep(0.3)  # an update that does not wait would change the weights now
        return copy(memory, files)

    def fill_and_tell(sampler, step, version):
        sampled = fill(sampler, step, version)
        if step == 3:
            is_sampled.set()
        return sampled

    monkeypatch.setattr(HostMemory, "copy", copy_late)
    monkeypatch.setattr(DynamicSampler, "fill", fill_and_tell)
    make().train()
    runs.assert_same_run(whole_run, tmp_path / "run", step=4)
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        one, two = (place / "checkpoints" / "step_2" / name for place in (whole_run, tmp_path / "run"))
        assert one.read_bytes() == two.read_bytes(), name
    with RunDatabase.open_readonly(tmp_path / "run" / "run.db") as database:
        third = list(database.steps())[2]
    assert third["timing_s/checkpoint"] > 0.25
    parts = sum(third[f"timing_s/{part}"] for part in ("generate", "reward", "train"))
    assert third["timing_s/step"] < parts + 0.25, "the wait does not count as training"


def test_the_reference_of_adapters_waits_for_the_copy_of_their_merged_weights(make, tmp_path, monkeypatch):
    """In bf16 the reference writes the base weights in place of the merged ones, which a checkpoint holds."""
    is_reference, is_copied, copy, unmerged = threading.Event(), threading.Event(), HostMemory.copy, lora.unmerged
    saved = {}

    def remember():
        saved.update({name: tensor.clone() for name, tensor in trainer.policy.weights()})
        is_reference.clear()

    def copy_late(memory, files):
        is_reference.wait(timeout=1)
        copied = copy(memory, files)
        is_copied.set()
        return copied

    @contextmanager
    def unmerged_during_the_copy(weights):
        assert weights, "this test needs merged weights"
        with unmerged(weights):
            is_reference.set()
            assert not saved or is_copied.wait(timeout=60)
            yield

    monkeypatch.setattr(HostMemory, "copy", copy_late)
    monkeypatch.setattr(lora, "unmerged", unmerged_during_the_copy)
    options = {"model.dtype": "bfloat16", "model.lora.rank": 2, "algorithm.kl_loss_coef": 0.1}
    trainer = make(options, callbacks=At(2, remember))
    trainer.train()
    found = runs.weights(tmp_path / "run", 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_a_copy_that_fails_ends_the_run_and_the_checkpoint_before_stays(make, tmp_path, monkeypatch):
    copy, copies = HostMemory.copy, []

    def copy_once(memory, files):
        copies.append(files)
        if len(copies) == 2:
            raise MemoryError("no memory is left")
        return copy(memory, files)

    monkeypatch.setattr(HostMemory, "copy", copy_once)
    with pytest.raises(MemoryError, match="no memory is left"):
        make(EVERY_STEP).train()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]
    assert is_unlocked(tmp_path / "run")


def test_a_checkpoint_waits_for_the_one_before_and_its_seconds_are_metrics(make, tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch, step=2)
    # Released only while step 3 waits to be saved.
    make(EVERY_STEP, callbacks=At(3, threading.Timer(0.3, disk.goes_on.set).start)).train()
    assert disk.largest == 1
    with RunDatabase.open_readonly(tmp_path / "run" / "run.db") as database:
        first, second, _, last = database.steps()
    assert "timing_s/checkpoint" not in first
    assert second["timing_s/checkpoint"] > 0, "the save of step 1"
    assert last["timing_s/checkpoint"] > 0.2, "the save of step 3, and the rest of step 2's"
    assert last["timing_s/checkpoint_write"] > 0.2, "step 2's, which includes the wait"


def test_a_disk_that_fills_up_in_the_background_ends_the_run_at_the_next_step(make, tmp_path, monkeypatch, whole_run):
    def write(path, tensors, before_piece):
        if "step_2" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(path, tensors, before_piece)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    trainer, run = make(EVERY_STEP), tmp_path / "run"
    sentence = r"step_2: cannot be written \(No space left on device\); free some .* which continues after step 1$"
    with pytest.raises(StorageError, match=sentence) as raised:
        trainer.train()
    assert trainer.step in (2, 3)  # step 2 if the write failed while it was begun
    assert kinds(run)[-1] == ("stopped", str(raised.value))
    assert os.listdir(run / "checkpoints") == ["step_1"]
    monkeypatch.undo()
    trainer.train()
    runs.assert_same_run(whole_run, run, step=4)


def test_a_second_ctrl_c_gives_up_the_checkpoint_and_ends_at_once(make, tmp_path, monkeypatch, whole_run):
    SlowDisk(monkeypatch, step=2)  # which never goes on

    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer, run = make(EVERY_STEP, callbacks=At(3, press_twice)), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not writers()
    assert is_unlocked(run)
    assert os.listdir(run / "checkpoints") == ["step_1"]
    monkeypatch.undo()
    trainer.callbacks.members.clear()
    trainer.train()
    runs.assert_same_run(whole_run, run, step=4)


def test_a_second_ctrl_c_ends_the_wait_for_a_checkpoint_too(make, tmp_path, monkeypatch):
    SlowDisk(monkeypatch, step=2)
    press = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))

    def press_now_and_later():
        signal.raise_signal(signal.SIGINT)
        press.start()

    with pytest.raises(KeyboardInterrupt):
        make(EVERY_STEP, callbacks=At(3, press_now_and_later)).train()
    assert not writers()
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_1"]


def test_close_waits_for_the_checkpoint_that_is_being_written(make, tmp_path, monkeypatch):
    disk, trainer = SlowDisk(monkeypatch, step=1), make(EVERY_STEP)
    for _ in trainer.steps():
        assert writers()
        threading.Timer(0.2, disk.goes_on.set).start()
        trainer.close()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]
    assert is_unlocked(tmp_path / "run")


def test_without_memory_for_a_copy_training_waits_and_says_so_once(make, tmp_path, monkeypatch, whole_run):
    monkeypatch.setattr(host, "memory", lambda: (1_000_000, 1_000))
    seen = []
    make(EVERY_STEP, callbacks=lambda trainer, step: seen.append(len(writers()))).train()
    assert seen == [0, 0, 0, 0]
    (message,) = (message for kind, message in kinds(tmp_path / "run") if kind == "memory")
    assert message.endswith("but only 1 kB of memory are free; training waits while checkpoints are written")
    runs.assert_same_run(whole_run, tmp_path / "run", step=4)


KILLED = """
import json, os, signal, sys, threading
from pathlib import Path
from dapo.checkpoint import folder
from tests.training.conftest import make_trainer

write, is_halfway = folder.write_tensors, threading.Event()

def write_half(path, tensors, before_piece):
    digest = write(path, tensors, before_piece)
    if "step_2" in path.parts and path.name == "optimizer.safetensors":
        os.truncate(path, path.stat().st_size // 2)
        is_halfway.set()
        threading.Event().wait()
    return digest

def kill(trainer, step):
    if step.step == 3:
        trainer.recorder.flush()
        is_halfway.wait()
        os.kill(os.getpid(), signal.SIGKILL)

folder.write_tensors = write_half
make_trainer(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), callbacks=kill).train()
"""


def test_a_run_killed_in_the_middle_of_a_background_write_resumes_from_the_checkpoint_before(
    make, tmp_path, tiny_model, whole_run
):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(tiny_model), json.dumps(EVERY_STEP)]
    dead = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    run = tmp_path / "run"
    half = run / "checkpoints" / ".partial" / "step_2" / "trainer" / "optimizer.safetensors"
    assert half.is_file()
    assert [step["step"] for step in runs.metrics(run)] == [1, 2, 3]
    make({**EVERY_STEP, "run.name": "run"}, resume=True).train()
    (message,) = (message for kind, message in kinds(run) if kind == "resumed")
    assert message.startswith("resumed from step 1: 2 later steps with ")
    assert not half.parent.parent.parent.exists()
    runs.assert_same_run(whole_run, run, step=4)


def test_a_checkpoint_that_is_damaged_after_it_was_written_in_the_background_is_refused(make, tmp_path):
    make(EVERY_STEP).train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
    victim = tmp_path / "run" / "checkpoints" / "step_3" / "trainer" / "optimizer.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.safetensors is not what was written"):
        make({**EVERY_STEP, "run.name": "run"}, resume=True)
