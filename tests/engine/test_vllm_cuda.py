"""vLLM on a GPU: every transport of weights, sleep, and a run that learns and samples in turns."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo import Trainer
from dapo.engine.vllm.arguments import VllmOptions
from dapo.engine.vllm.engine import VllmEngine
from dapo.types import SamplingParams
from tests import plain, runs
from tests.engine.conftest import MAX_CONCURRENT, MAX_LENGTH, SEED, STOP, Subject, tiny_pair
from tests.engine.test_contract import by_key, drain, groups, rest
from tests.tiny import save_tiny, tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROUNDING = 0.08  # bound on the mean rounding error of a tiny random model's log-probabilities in bfloat16


@pytest.fixture(scope="module", params=["memory", "ipc", "nccl"])
def on_gpu(request, tmp_path_factory) -> Iterator[Subject]:
    directory, model = tiny_pair(tmp_path_factory.mktemp(request.param))
    model = model.to("cuda", torch.bfloat16)
    options = VllmOptions(
        directory, SEED, MAX_LENGTH, MAX_CONCURRENT, dtype="bfloat16", memory_fraction=0.2,
        extra={"enforce_eager": True}, transport=request.param, devices=[0],
    )  # fmt: skip
    # NCCL refuses two processes on one GPU unless they appear to be on two machines.
    alone = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    before = dict(os.environ)
    os.environ.update(alone | {"NCCL_HOSTID": "sampler"})
    if request.param == "ipc":
        options = replace(options, shares_gpu=True)
    engine = VllmEngine(options, STOP, tiny_tokenizer(), lambda: model.state_dict().items(), sync_seconds=60)
    os.environ["NCCL_HOSTID"] = "learner"
    yield Subject(engine, model)
    engine.close()
    os.environ.clear()
    os.environ.update(before)


def change(subject: Subject) -> None:
    """Change all weights by far more than rounding, and sync."""
    generator = torch.Generator("cuda").manual_seed(subject.version)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter += (0.05 * noise).to(parameter.dtype)
    subject.version += 1
    subject.engine.sync_weights(subject.version)


def gap(subject: Subject, requests, found) -> float:
    """Return the mean difference to the log-probabilities of the current weights in float32."""
    twin = plain.plain_copy(subject.model, torch.float32).cpu()
    questions = {request.serial: request.prompt for request in requests}
    gaps = []
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, questions[serial], [rollout.tokens.tolist()], 1.0)
        gaps.append(np.abs(rollout.logprobs - expected.numpy()))
    return float(np.concatenate(gaps).mean())


def test_every_update_arrives_whole(on_gpu):
    requests = groups(6, 4, SamplingParams(max_tokens=12), seed=1)
    for _ in range(3):
        before = drain(on_gpu.engine, *requests)
        assert gap(on_gpu, requests, before) < ROUNDING
        change(on_gpu)
        assert gap(on_gpu, requests, before) > 5 * ROUNDING  # otherwise the check below could not fail
        after = drain(on_gpu.engine, *requests)
        assert gap(on_gpu, requests, after) < ROUNDING
        assert {rollout.weight_version for rollout in after.values()} == {on_gpu.version}


def test_rollouts_in_flight_continue_with_the_new_weights(on_gpu):
    requests = groups(8, 8, SamplingParams(max_tokens=200), seed=10)
    on_gpu.engine.submit(requests)
    early = on_gpu.engine.poll()
    change(on_gpu)
    found = by_key(early + rest(on_gpu.engine))
    assert len(found) == 64
    assert any(rollout.switches for rollout in found.values())


def test_sleep_frees_the_memory_and_sampling_is_the_same_after_it(on_gpu):
    requests = groups(6, 4, SamplingParams(temperature=0, max_tokens=12), seed=2)
    before = drain(on_gpu.engine, *requests)
    awake = torch.cuda.mem_get_info()[0]
    on_gpu.engine.suspend()
    freed = torch.cuda.mem_get_info()[0] - awake
    assert freed > 10 << 30 if on_gpu.engine.options.shares_gpu else abs(freed) < 1 << 30
    after = drain(on_gpu.engine, *requests)
    assert all(np.array_equal(before[key].tokens, after[key].tokens) for key in before)
    on_gpu.engine.suspend()
    change(on_gpu)
    others = groups(6, 4, SamplingParams(max_tokens=12), seed=3)
    assert gap(on_gpu, others, drain(on_gpu.engine, *others)) < ROUNDING


def test_a_run_learns_and_samples_in_turns_on_one_gpu(tmp_path):
    save_tiny(tmp_path / "model", hidden_size=128)
    rollout = {"n": 4, "engine": "vllm", "kv_memory_fraction": 0.2, "vllm": {"enforce_eager": True}}
    config = runs.load(tmp_path, "run.steps=3", "model.device=cuda", rollout=rollout)
    trainer = Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    steps = runs.metrics(config.run_dir)
    assert all(step["updates"] > 0 and step["engine/sync_s"] > 0 for step in steps)
    assert max(step["logprob_gap/mean"] for step in steps) < 0.05
