"""Updates of LoRA adapters on the fused trunk: the same as through transformers, and sampled from without a gap."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.checkpoint.weights import ADAPTERS, OPTIMIZER
from dapo.config import LoraConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.embedded.paged import PagedDecoder
from dapo.model import graphs, varlen
from dapo.model.lora import adapter_state, add_adapters
from dapo.model.trunk import _TRUNKS, FusedTrunk
from dapo.model.varlen import Layout, Segments, VarlenAttention
from dapo.policy import policy as policy_module
from dapo.policy.captured import CapturedBackward
from dapo.policy.policy import Policy
from dapo.types import Prompt, Request, SamplingParams, Score
from tests.graphs import capture
from tests.model.test_varlen import flash_backward
from tests.policy.test_captured import gradients
from tests.policy.test_update import config, for_dapo, random_groups
from tests.tiny import EOS_ID, tiny_llama, tiny_qwen2, tiny_tokenizer

OPTIONS = {"optim__lr": 1e-2, "optim__warmup_steps": 0, "algorithm__max_logprob_gap": 100.0}


def lora_policy(build=tiny_qwen2, *, fused=True, dtype=torch.float32, targets="all-linear", **options):
    model = for_dapo(build()).to(dtype)
    torch.manual_seed(0)
    lora = add_adapters(model, LoraConfig(rank=4, alpha=8.0, target_modules=targets))
    if fused:
        _TRUNKS[model] = FusedTrunk.of(model)
    return Policy(lora, config(**OPTIONS, **options))


def adapters(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}


def logprobs(policy, groups):
    return {key: torch.from_numpy(v) for key, v in policy._rollout_logprobs(policy.causal_lm, groups).items()}


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_the_fused_update_is_that_of_transformers(build, targets):
    plain, fused = (lora_policy(build, fused=fused, targets=targets) for fused in (False, True))
    assert fused.optimizer.joined and not plain.optimizer.joined
    start = adapters(fused)
    for step in (1, 2, 3):
        groups = random_groups(step, 5, 4)
        one, two = plain.update(groups, step, 0), fused.update(groups, step, 0)
        assert two.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=1e-3)
        expected = logprobs(plain, groups)
        for key, values in logprobs(fused, groups).items():
            torch.testing.assert_close(values, expected[key], atol=2e-3, rtol=0)
    assert all(not torch.equal(value, start[name]) for name, value in adapters(fused).items())


def test_an_update_that_is_skipped_leaves_the_merged_weights():
    policy = lora_policy()
    policy.update(random_groups(1, 5, 4), 1, 0)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.optimizer.step = lambda learning_rate: float("nan")
    result = policy.update(random_groups(2, 5, 4), 2, 0)
    assert result.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


def test_a_replayed_update_has_the_gradient_of_an_ordinary_one(monkeypatch):
    monkeypatch.setattr(varlen, "_flash_backward", flash_backward)
    monkeypatch.setattr(graphs.GraphPool, "capture", capture)
    plan = lambda model, families, positions_T: VarlenAttention(Segments(Layout.of(families), positions_T.device))  # noqa: E731
    monkeypatch.setattr(policy_module, "packed_plan", plan)
    eager, captured = lora_policy(), lora_policy()
    captured.captured = CapturedBackward(captured._forward_backward, 10_000, torch.device("cpu"))
    for step in (1, 2):  # the second time, a graph of the first step sees the changed adapters
        groups = random_groups(3, 5, 4)
        _, expected = gradients(eager, groups)
        _, found = gradients(captured, groups)
        assert len(captured.captured.captured) == 1
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-3)
        for policy in (eager, captured):
            policy.update(groups, step, 0)


@pytest.mark.parametrize("decoder", ["eager", "paged"])
def test_the_sampler_sees_every_update_and_agrees_with_the_trainer(decoder):
    policy = lora_policy()
    engine = EmbeddedEngine(policy.causal_lm, tiny_tokenizer(), frozenset({EOS_ID}), 0, 16)
    if decoder == "paged":
        engine.decoder = PagedDecoder(policy.causal_lm, frozenset({EOS_ID}), 16, max_length=64, pages=200)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 9, 20)]
    seen = []
    for step in (1, 2, 3):
        engine.submit([Request(i, p, 4, SamplingParams(max_tokens=20)) for i, p in enumerate(prompts)])
        rollouts = []
        while finished := engine.poll():
            rollouts += finished
        groups = []
        for serial, tokens in enumerate(prompts):
            members = sorted((r for r in rollouts if r.serial == serial), key=lambda rollout: rollout.index)
            scores = [Score(float(i % 2)) for i in range(4)]
            groups.append(form_group(serial, Prompt(str(serial), (), tokens, None), members, scores, GroupRules(40)))
        metrics = policy.update(groups, step, version=step - 1).metrics
        assert metrics["updates"] == 1 and metrics["logprob_gap/max"] < 1e-4 and metrics["logprob_gap/mean"] < 1e-5
        engine.sync_weights(step)
        seen.append(groups[0].rollouts[0].logprobs[0])
    assert len(set(map(float, seen))) == 3, "the adapters changed what is sampled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_policy_has_the_bits_of_the_saved_one(dtype, tmp_path):
    policy = lora_policy(dtype=dtype)
    for step in (1, 2):
        assert policy.update(random_groups(step, 5, 4), step, 0).updates == 1
    (tmp_path / "trainer").mkdir()
    save_file(adapter_state(policy.model), tmp_path / ADAPTERS)
    save_file(policy.optimizer.state_dict(), tmp_path / OPTIMIZER)
    restored = lora_policy(dtype=dtype)
    restored.restore(tmp_path)
    for one, two in zip(policy.trunk.weights, restored.trunk.weights, strict=True):
        assert torch.equal(one.value, two.value)
    for step in (3, 4):
        for each in (policy, restored):
            each.update(random_groups(step, 5, 4), step, 0)
    restored_weights = dict(restored.weights())
    assert all(torch.equal(tensor, restored_weights[name]) for name, tensor in policy.weights())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_model_before_training(dtype):
    policy, groups = lora_policy(dtype=dtype, algorithm__kl_loss_coef=0.1), random_groups(1, 4, 4)
    before = policy.reference_logprobs(groups)
    start = logprobs(policy, groups)
    policy.update(random_groups(2, 5, 4, with_reference=True), 1, 0)
    trained = logprobs(policy, groups)
    after = policy.reference_logprobs(groups)
    for group, one, two in zip(groups, before, after, strict=True):
        for rollout, first, second in zip(group.rollouts, one, two, strict=True):
            assert (first == second).all()
            assert torch.equal(torch.from_numpy(first), start[group.serial, rollout.index])
    assert any(not torch.equal(trained[key], start[key]) for key in start)
    again = logprobs(policy, groups)
    assert all(torch.equal(again[key], values) for key, values in trained.items()), "the adapters are merged again"
