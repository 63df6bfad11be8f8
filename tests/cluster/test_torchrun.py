"""Runs of two processes under torchrun: what they train, how they stop, and how they resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dapo import Trainer
from dapo.errors import CheckpointError, ConfigError
from dapo.store.database import RunDatabase
from tests import runs
from tests.training.test_episodes import load as load_episodes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [] if arguments[0].endswith(".py") else ["-m", "dapo"]
    return subprocess.Popen(
        [*LAUNCH, *program, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def sentences(text: str) -> list[str]:
    """Return our error messages, without torchrun's own report."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


def assert_same(first: Path, second: Path, step: int) -> None:
    assert runs.verdicts(first) == runs.verdicts(second)
    one, two = runs.weights(first, step), runs.weights(second, step)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    for before, after in zip(runs.metrics(first), runs.metrics(second), strict=True):
        for name, value in before.items():
            if not name.startswith(("engine/", "logprob_gap/", "tokens/computed")):
                assert after[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < limit and process.poll() is None, process.communicate()
        time.sleep(0.02)


def has_steps(run_dir: Path) -> bool:
    try:
        return bool(runs.metrics(run_dir))
    except CheckpointError:  # the database does not exist yet, or is being created
        return False


def pid_of(rank: int, run_dir: Path) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            started = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in started and f"run.name={run_dir.name}".encode() in words:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def test_two_processes_train_what_one_trains_and_resume_after_one_is_killed(tmp_path):
    # Adam's first updates depend on the sign of gradients near zero, so a small learning rate keeps runs close.
    options = ["optim.lr=1e-5", "run.steps=5", "run.save_every=1"]
    one = runs.load(tmp_path, "run.name=one", *options)
    Trainer(one).train()
    two = one.run_dir.parent / "two"
    arguments = ["train", str(tmp_path / "recipe.yaml"), "run.name=two", *options, "cluster.learners=2"]
    process = launch(*arguments)
    wait_until(lambda: (two / "checkpoints" / "step_2").exists(), process)
    os.kill(pid_of(1, two), signal.SIGKILL)
    code, _, err = finish(process)
    assert code != 0
    (sentence,) = sentences(err)
    assert sentence == "error: another process of this run was killed or crashed; resume with --resume"
    code, out, err = finish(launch(*arguments, "--resume"))
    assert code == 0, err
    assert out.count("5 steps,") == 1, "only rank 0 prints"
    assert_same(one.run_dir, two, step=5)
    with RunDatabase.open_readonly(two / "run.db") as database:
        assert [event["kind"] for event in database.events()].count("resumed") == 1


def test_two_processes_train_on_the_episodes_that_one_trains_on(tmp_path):
    options = ["optim.lr=1e-5", "run.steps=2"]
    one = load_episodes(tmp_path, "run.name=one", *options)
    Trainer(one).train()
    arguments = ["train", str(tmp_path / "recipe.yaml"), "run.name=two", *options, "cluster.learners=2"]
    code, _, err = finish(launch(*arguments))
    assert code == 0, err
    assert_same(one.run_dir, one.run_dir.parent / "two", step=2)
    assert all(step["turns/mean"] > 1 for step in runs.metrics(one.run_dir) if step["groups/generated"])


def test_every_process_loads_the_parts_of_the_update(tmp_path):
    (tmp_path / "parts.py").write_text(runs.SEQUENCE_LOSS + "\ndef half(step, total): return 0.5\n")
    options = [f"algorithm.loss={tmp_path}/parts.py:loss", f"optim.lr_schedule={tmp_path}/parts.py:half"]
    options += ["optim.lr=1e-5", "run.steps=2"]
    one = runs.load(tmp_path, "run.name=one", *options)
    Trainer(one).train()
    code, _, err = finish(launch("train", str(tmp_path / "recipe.yaml"), "run.name=two", *options))
    assert code == 0, err
    assert_same(one.run_dir, one.run_dir.parent / "two", step=2)


def test_a_stopped_run_finishes_its_step_saves_and_resumes_in_one_process(tmp_path):
    options = ["optim.lr=1e-5", "run.steps=6", "run.save_every=0", "rollout.mode=inflight"]
    options += ["model.lora.rank=2", "algorithm.kl_loss_coef=0.01"]
    reward = runs.REWARD.replace("letters =", "__import__('time').sleep(0.02)\n    letters =")
    whole = runs.load(tmp_path, "run.name=whole", *options)
    Trainer(whole).train()
    slow = runs.recipe(tmp_path, reward=reward)
    stopped = whole.run_dir.parent / "stopped"
    process = launch("train", str(slow), "run.name=stopped", *options)
    wait_until(lambda: has_steps(stopped), process)
    process.send_signal(signal.SIGTERM)
    _, _, err = finish(process)
    assert not sentences(err), err
    steps = len(runs.metrics(stopped))
    assert 0 < steps < 6
    assert (stopped / "checkpoints" / f"step_{steps}").is_dir()
    Trainer(runs.load(tmp_path, "run.name=stopped", *options), resume=True).train()
    assert_same(whole.run_dir, stopped, step=6)


FAULTY = """
import os, sys
from dapo.cluster import torchrun, torchrun_parts
from dapo.cli import main
from dapo.errors import ModelError

def poll(self, wait=True):
    raise ModelError("there is no room for this")

if os.environ["RANK"] in sys.argv.pop(1):
    torchrun_parts.TorchrunRank.poll = poll
torchrun.run(main)
"""


@pytest.mark.parametrize("faulty", ["1", "01"])
def test_a_mistake_on_any_rank_ends_all_of_them_with_one_sentence(tmp_path, faulty):
    recipe = runs.recipe(tmp_path)
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    start = time.monotonic()
    code, _, err = finish(launch(str(script), faulty, "train", str(recipe)))
    assert code != 0
    assert sentences(err) == ["error: there is no room for this"]
    assert str(ROOT / "dapo") not in err, "no traceback of ours"
    assert time.monotonic() - start < 100


def test_processes_that_would_each_train_alone_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each would train alone; start them with -m dapo train"):
        Trainer(runs.load(tmp_path))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cluster.learners=3", "cluster.learners is 3, but torchrun has started 2 processes"),
        ("algorithm.ledger={enable: true, lookahead: 2}", "algorithm.ledger.lookahead reads the hidden states"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("data.max_response_length=4000", "the model's context is 512 tokens"),
    ],
)
def test_a_configuration_error_is_printed_once(tmp_path, option, words):
    code, _, err = finish(launch("train", str(runs.recipe(tmp_path)), option))
    assert code != 0
    (sentence,) = sentences(err)
    assert words in sentence
