"""The vLLM engine: its processes, weight changes in flight, and the errors raised before it starts."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import Distribution
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from dapo import Config, Trainer
from dapo.engine.vllm import arguments as _vllm_args
from dapo.engine.vllm.engine import check_vllm
from dapo.engine.vllm.weights import _distinct
from dapo.errors import ConfigError, DapoError, EngineError, ModelError
from dapo.types import Request, SamplingParams
from tests import plain, runs
from tests.engine.conftest import CACHE_BYTES, open_vllm, tiny_pair
from tests.engine.test_contract import by_key, drain, groups, rest

ROOT = Path(__file__).parent.parent.parent
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class Installed(Distribution):
    """The metadata of some installed version of vLLM."""

    def __init__(self, version: str, torch_version: str) -> None:
        self.text = f"Name: vllm\nVersion: {version}\nRequires-Dist: torch=={torch_version}\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(_vllm_args.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^rollout.engine is vllm, but vLLM is not installed: pip install"):
        _vllm_args.require_vllm()


@pytest.mark.parametrize(
    ("version", "torch_version", "message"),
    [
        ("0.31.0", torch.__version__, r"^vLLM 0.31.0 is installed, but 0.32 is required"),
        ("0.32.1", "1.2.3", r"^vLLM 0.32.1 was built for torch 1.2.3, but torch .* is installed"),
    ],
)
def test_versions_that_do_not_fit_together_are_refused(monkeypatch, version, torch_version, message):
    monkeypatch.setattr(_vllm_args.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_vllm_args, "_distribution", lambda name: Installed(version, torch_version))
    with pytest.raises(ConfigError, match=message):
        _vllm_args.require_vllm()


def test_any_build_of_the_torch_that_vllm_was_built_for_is_accepted(monkeypatch):
    monkeypatch.setattr(_vllm_args.importlib.util, "find_spec", lambda name: object())
    public = torch.__version__.split("+")[0]
    monkeypatch.setattr(_vllm_args, "_distribution", lambda name: Installed("0.32.0", f"{public}+other"))
    _vllm_args.require_vllm()


def test_more_gpus_than_there_are_is_refused(tmp_path):
    config = runs.load(tmp_path, "rollout.engine=vllm", "rollout.tensor_parallel=64")
    with pytest.raises(ConfigError, match=r"^rollout.tensor_parallel is 64, but PyTorch finds \d+ GPUs here$"):
        check_vllm(config, tmp_path)


@pytest.mark.parametrize("override", ["rollout.vllm.enforce_eager=true", "rollout.tensor_parallel=2"])
def test_options_of_vllm_are_refused_for_the_embedded_engine(tmp_path, override):
    with pytest.raises(ConfigError, match=r"set rollout\.engine to vllm"):
        runs.load(tmp_path, override)


@needs_vllm
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"enforce_eagre": True}, r"^rollout.vllm.enforce_eagre: .* no such argument; did you mean enforce_eager\?$"),
        ({"zebra": 1}, r"^rollout.vllm.zebra: vLLM's engine has no such argument$"),
        ({"max_model_len": 7}, r"^rollout.vllm.max_model_len: set data.max_prompt_length"),
        ({"logprobs_mode": "raw_logprobs"}, r"^rollout.vllm.logprobs_mode: is set by dapo"),
        ({"scheduling_policy": "odd"}, r"^rollout.vllm: vLLM refuses policy: Input should be 'fcfs' or 'priority'$"),
    ],
)
def test_arguments_that_vllm_does_not_have_or_take_are_refused_before_it_starts(tmp_path, extra, message):
    refused(runs.load(tmp_path), tmp_path / "model", extra, ConfigError, message)


@needs_vllm
def test_a_model_that_vllm_does_not_know_is_refused_before_it_starts(tmp_path):
    config = runs.load(tmp_path)
    shape = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(shape | {"architectures": ["ZebraForCausalLM"]}))
    message = r"/model: vLLM cannot run this model \(.*ZebraForCausalLM.* not supported.*\); set rollout.engine to"
    refused(config, tmp_path / "model", {}, ModelError, message)


def refused(config: Config, directory: Path, extra: dict, kind: type[DapoError], message: str) -> None:
    before = set(vllm_processes(os.getpid()))
    rollout = config.rollout.model_copy(update={"engine": "vllm", "vllm": extra})
    with pytest.raises(kind, match=message) as caught:
        check_vllm(config.model_copy(update={"rollout": rollout}), directory)
    assert "\n" not in str(caught.value)
    assert set(vllm_processes(os.getpid())) == before


@pytest.mark.parametrize(
    ("learner", "count", "tensor_parallel", "expected"),
    [
        ("cpu", 0, 1, ("memory", None)),
        ("cuda:0", 1, 1, ("ipc", [0])),
        ("cuda:0", 4, 2, ("nccl", [1, 2])),
        ("cuda:2", 3, 2, ("nccl", [0, 1])),
        ("cuda:0", 2, 2, ("memory", None)),
    ],
)
def test_the_transport_depends_on_where_the_learner_and_vllm_are(learner, count, tensor_parallel, expected):
    assert _vllm_args.choose_transport(torch.device(learner), count, tensor_parallel) == expected


def test_a_tied_head_is_sent_once_and_a_slice_is_not_mistaken_for_its_tensor():
    table, joined = torch.randn(4, 3), torch.randn(2, 3, 3)
    sent = _distinct([("embed", table), ("q", joined[0]), ("all", joined), ("k", joined[1]), ("head", table)])
    assert list(sent) == ["embed", "q", "all", "k"]


def test_tokens_in_flight_are_drawn_from_the_weights_that_their_version_names(vllm_subject):
    """The cache is recomputed: the new weights see their own keys and values for tokens that the old ones drew."""
    requests = groups(8, 8, SamplingParams(max_tokens=200), seed=20)
    old = plain.plain_copy(vllm_subject.model, torch.float32)
    vllm_subject.engine.submit(requests)
    early = vllm_subject.engine.poll()
    vllm_subject.change()
    new = plain.plain_copy(vllm_subject.model, torch.float32)
    found = by_key(early + rest(vllm_subject.engine))
    assert any(rollout.switches for rollout in found.values())
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            by_old, by_new = (
                plain.logprobs(model, requests[serial].prompt, [rollout.tokens.tolist()])[0].numpy()
                for model in (old, new)
            )
        expected = np.where(rollout.versions < vllm_subject.version, by_old, by_new)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)


def test_a_version_that_drew_no_token_of_a_response_still_counts(vllm_subject):
    engine, before = vllm_subject.engine, vllm_subject.version
    engine.submit(groups(8, 8, SamplingParams(max_tokens=200), seed=21))
    early = engine.poll()
    vllm_subject.version += 2
    engine.sync_weights(vllm_subject.version)
    found = early + rest(engine)
    switched = [rollout for rollout in found if rollout.switches]
    assert switched
    for rollout in switched:
        assert len(rollout.switches) == 2 and rollout.switches[0] == rollout.switches[1]
        assert (rollout.versions[0], rollout.versions[-1]) == (before, before + 2)


def test_the_size_of_the_cache_is_what_vllm_was_given(vllm_subject):
    assert _vllm_args.cache_size(vllm_subject.engine.llm.vllm_config) == CACHE_BYTES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_meant_for_the_run_do_not_reach_vllm(vllm_subject, number):
    """Ctrl-C reaches all processes of a terminal, a batch system's SIGTERM all of a job. The run ends its step."""
    for process in vllm_subject.engine.processes:
        process.send_signal(number)
    time.sleep(0.5)
    assert len(drain(vllm_subject.engine, *groups(4, 4, SamplingParams(max_tokens=10)))) == 16


def test_a_sync_that_hangs_times_out_with_an_explanation_and_leaves_no_process(tmp_path):
    """Also tests that a model with a tied head loads new weights."""
    directory, model = tiny_pair(tmp_path, "qwen2", tie_word_embeddings=True)
    engine = open_vllm(directory, model, sync_seconds=20)
    try:
        with torch.no_grad():
            model.model.embed_tokens.weight *= 1.3  # vLLM keeps a packed copy of it as the head
        engine.sync_weights(1)
        found = drain(engine, Request(0, (5, 6, 7), 4, SamplingParams(max_tokens=12)))
        for rollout in found.values():
            twin = plain.plain_copy(model, torch.float32)
            with torch.no_grad():
                (expected,) = plain.logprobs(twin, (5, 6, 7), [rollout.tokens.tolist()])
            np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=1e-4)
        engine.processes[-1].suspend()
        engine.sync_seconds = 2
        with pytest.raises(EngineError, match=r"did not load the weights of version 2 within 2 seconds"):
            engine.sync_weights(2)
        assert not any(process.is_running() for process in engine.processes)
    finally:
        engine.close()


def test_vllm_that_dies_while_it_samples_is_reported_in_one_sentence(tmp_path):
    engine = open_vllm(*tiny_pair(tmp_path))
    try:
        engine.submit(groups(40, 8, SamplingParams(max_tokens=200)))
        engine.poll()
        engine.processes[0].kill()
        with pytest.raises(EngineError, match=r"^vLLM ended or failed while it was sampling \(.*\);"):
            rest(engine)
        assert not any(process.is_running() for process in engine.processes)
    finally:
        engine.close()


TRAINING = "from dapo.cli import main; import sys; sys.argv = ['dapo', 'train', sys.argv[1]]; main()"


@needs_vllm
@pytest.mark.timeout(1200)  # vLLM starts twice
def test_a_killed_run_takes_vllm_with_it_and_can_be_resumed(tmp_path):
    options = {"engine": "vllm", "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES}}
    tiny_pair(tmp_path)  # where the recipe expects its model
    recipe = runs.recipe(tmp_path, run={"steps": 10_000, "save_every": 2, "dir": str(tmp_path)}, rollout=options)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", TRAINING, str(recipe)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "recipe/checkpoints/step_2").exists() or process.poll() is not None, 500)
        assert process.poll() is None, (tmp_path / "log").read_text()
        children = vllm_processes(process.pid)
        assert len(children) >= 2
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(child.is_running() for child in children), 30)
    before = set(vllm_processes(os.getpid()))
    saved = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "recipe/checkpoints").glob("step_*"))
    config = Config.load(recipe, [f"run.steps={saved + 2}", "rollout.mode=inflight"])
    result = Trainer(config, resume=True).train()
    assert result.steps == saved + 2
    steps = runs.metrics(config.run_dir)
    assert [step["step"] for step in steps] == list(range(1, saved + 3))
    assert max(step.get("logprob_gap/max", 0) for step in steps) < 1e-4
    assert sum(step["updates"] for step in steps) > 0
    assert set(vllm_processes(os.getpid())) == before


def vllm_processes(parent: int) -> list[psutil.Process]:
    """Return the processes below `parent` that vLLM has named."""
    return [p for p in psutil.Process(parent).children(recursive=True) if p.name().startswith("VLLM")]


def wait_until(is_so, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)
