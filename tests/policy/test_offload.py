"""Moments in the host's memory: the same updates and the same files, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.config import OptimConfig
from dapo.errors import ModelError
from dapo.model.memory import GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES, Division
from dapo.policy import offload, policy
from dapo.policy.offload import host_bytes, offloaded_step
from dapo.policy.optimizer import Optimizer
from dapo.policy.policy import Policy
from tests.policy.test_update import config, for_dapo, random_groups
from tests.tiny import tiny_llama


def adam(seed: int = 0) -> torch.optim.AdamW:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5,), (33, 7), (2, 64), (300, 5)]
    parameters = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.3, fused=True)


def set_grads(optimizer: torch.optim.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_an_offloaded_step_makes_the_updates_of_adamw_bit_for_bit(chunk):
    whole, parts = adam(), adam()
    for step in range(4):
        set_grads(whole, step)
        set_grads(parts, step)
        skipped = parts.param_groups[0]["params"][0], whole.param_groups[0]["params"][0]
        if step == 2:  # a parameter without a gradient is left alone
            for parameter in skipped:
                parameter.grad = None
        whole.step()
        offloaded_step(parts, chunk)
    for first, second in zip(whole.param_groups[0]["params"], parts.param_groups[0]["params"], strict=True):
        assert torch.equal(first, second)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole.state[first][name], parts.state[second][name])


def trained(monkeypatch, division: Division, steps: int, folder: Path | None = None) -> Policy:
    """Train a tiny bf16 model with float32 masters; from step 3 on with what the folder holds, if there is one."""
    monkeypatch.setattr(policy, "division", lambda *arguments, **options: division)
    model = for_dapo(tiny_llama().to(torch.bfloat16))
    found = Policy(model, config(optim__lr=1e-2, algorithm__max_logprob_gap=1e9))
    if folder is not None:
        model.load_state_dict(load_file(folder / "model"), strict=False)
        found.optimizer.load_state_dict(load_file(folder / "optimizer"))
    for step in range(1 if folder is None else 3, steps + 1):
        found.update(random_groups(2, 3, step), step=step, version=0)
    return found


def equal(first: Policy, second: Policy) -> bool:
    states = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert states[0].keys() == states[1].keys() and any(name.startswith("exp_avg/") for name in states[0])
    weights = zip(first.model.parameters(), second.model.parameters(), strict=True)
    pairs = [*weights, *((states[0][name], states[1][name]) for name in states[0])]
    return all(torch.equal(*pair) for pair in pairs)


OFFLOADED = Division(offloads=True, lends=True)


def test_a_policy_that_offloads_and_frees_its_gradients_learns_the_same_bits(monkeypatch):
    monkeypatch.setattr(offload, "_CHUNK", 100)
    found = trained(monkeypatch, OFFLOADED, 4)
    assert equal(trained(monkeypatch, Division(), 4), found)
    assert all(master.grad is None for master in found.optimizer.masters)


@pytest.mark.parametrize("resumed", [OFFLOADED, Division()])
def test_a_run_that_offloads_resumes_bit_for_bit_whether_it_still_has_to_or_not(monkeypatch, tmp_path, resumed):
    saved = trained(monkeypatch, OFFLOADED, 2)
    save_file(dict(saved.model.named_parameters()), tmp_path / "model")
    save_file(saved.optimizer.state_dict(), tmp_path / "optimizer")
    again = trained(monkeypatch, resumed, 4, tmp_path)
    assert equal(trained(monkeypatch, Division(), 4), again)


def test_a_host_without_memory_for_the_moments_is_an_error_in_one_sentence(monkeypatch):
    monkeypatch.setattr(policy, "memory", lambda: (10**9, 1000))
    with pytest.raises(ModelError, match=r"moments take .* kB, but fit neither on the GPU nor into the host's memory"):
        trained(monkeypatch, OFFLOADED, 0)


def test_moments_need_the_memory_that_torch_rounds_page_locked_tensors_up_to(monkeypatch):
    masters = [torch.zeros(shape) for shape in ((3, 11), (16, 16), (1,))]
    assert host_bytes(masters) == 2 * (256 + 1024 + 4)
    moments = tiny_llama().num_parameters() * MOMENT_BYTES
    monkeypatch.setattr(policy, "memory", lambda: (10**9, moments + 1000))
    with pytest.raises(ModelError, match="fit neither on the GPU nor into the host's memory"):
        trained(monkeypatch, OFFLOADED, 0)


def test_the_state_has_the_bytes_that_the_formulas_say():
    model = tiny_llama().to(torch.bfloat16)
    optimizer = Optimizer([*model.named_parameters()], OptimConfig())
    parameters = model.num_parameters()
    assert optimizer.pending_bytes == parameters * (GRADIENT_BYTES + MOMENT_BYTES)
    grads = [optimizer.grad_of(parameter) for parameter in optimizer.parameters]
    assert sum(grad.nbytes for grad in grads) == parameters * GRADIENT_BYTES == optimizer.gradient_bytes
    optimizer.step(1e-3)
    assert optimizer.pending_bytes == optimizer.gradient_bytes
    held = {"exp_avg": 0, "master": 0, "exp_avg_sq": 0, "step": 0}
    for name, tensor in optimizer.state_dict().items():
        held[name.partition("/")[0]] += tensor.nbytes
    assert held["exp_avg"] + held["exp_avg_sq"] == parameters * MOMENT_BYTES
    assert held["master"] == parameters * MASTER_BYTES
