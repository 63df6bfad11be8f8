"""Updates replayed as graphs of fixed size, with stand-ins for CUDA graphs and for the backward of flash attention."""

from __future__ import annotations

import pytest
import torch

from dapo.model import graphs, varlen
from dapo.model.trunk import _TRUNKS, FusedTrunk
from dapo.model.varlen import Layout, Segments, VarlenAttention
from dapo.policy import policy as policy_module
from dapo.policy.captured import CapturedBackward
from dapo.policy.policy import Policy
from tests.graphs import capture
from tests.model.test_varlen import flash_backward
from tests.policy.test_sharing import episodes
from tests.policy.test_update import config, for_dapo, random_groups
from tests.tiny import tiny_llama, tiny_qwen3


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(varlen, "_flash_backward", flash_backward)
    monkeypatch.setattr(graphs.GraphPool, "capture", capture)
    plan = lambda model, families, positions_T: VarlenAttention(Segments(Layout.of(families), positions_T.device))  # noqa: E731
    monkeypatch.setattr(policy_module, "packed_plan", plan)


def fused_policy(build=tiny_llama, **options):
    model = for_dapo(build())
    _TRUNKS[model] = FusedTrunk.of(model)
    policy = Policy(model, config(**options))
    assert policy.optimizer.joined
    return policy


def captured_policy(build=tiny_llama, **options):
    policy = fused_policy(build, **options)
    policy.captured = CapturedBackward(policy._forward_backward, 10_000, torch.device("cpu"))
    return policy


def gradients(policy, groups):
    policy.optimizer.zero_grad()
    policy.optimizer.zero_grad_buffers()
    results = [(batch, policy._backward(batch)) for batch in policy._micro_batches(groups, version=0)]
    return results, {
        name: m.grad.clone() for name, m in zip(policy.optimizer.names, policy.optimizer.masters, strict=True)
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
def test_a_replayed_update_has_the_gradient_and_the_metrics_of_an_ordinary_one(build, tied):
    tie = lambda: build(tie_word_embeddings=tied)  # noqa: E731
    eager, captured = fused_policy(tie), captured_policy(tie)
    for seed, count in ((3, 5), (4, 2), (3, 5), (5, 7)):  # smaller after larger, and one repeated
        groups = random_groups(seed, count, 4)
        expected, expected_grads = gradients(eager, groups)
        found, grads = gradients(captured, groups)
        for name, value in expected_grads.items():
            torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)
        for (_, result), (_, reference) in zip(found, expected, strict=True):
            torch.testing.assert_close(result.loss, reference.loss, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(result.logprobs_R, reference.logprobs_R, atol=1e-5, rtol=0)
            torch.testing.assert_close(result.entropy_R, reference.entropy_R, atol=1e-5, rtol=0)
            assert result.metrics.keys() == reference.metrics.keys()
    assert sum(entry.graph.replays for entry in captured.captured.captured.values()) == 4
    assert len(captured.captured.captured) < 4


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm__loss": "gspo", "algorithm__clip_ratio_low": 0.3, "algorithm__clip_ratio_high": 0.5},
        {"algorithm__importance_correction": "sequence-truncated"},
    ],
)
def test_padding_does_not_change_a_loss_over_whole_responses(options):
    eager, captured = fused_policy(**options), captured_policy(**options)
    groups = random_groups(3, 4, 4)
    expected, expected_grads = gradients(eager, groups)
    found, grads = gradients(captured, groups)
    assert captured.captured.captured
    for (_, result), (_, reference) in zip(found, expected, strict=True):
        for name, values in reference.metrics.items():
            torch.testing.assert_close(result.metrics[name], values, atol=1e-5, rtol=1e-5)
    for name, value in expected_grads.items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_turns_that_episodes_share_have_the_gradient_of_an_ordinary_update_in_graphs_and_in_pieces(seed):
    groups = episodes(seed, 4, 6)
    policies = [Policy(for_dapo(tiny_llama()), config(), share_prompts=False), fused_policy(), captured_policy()]
    assert any(family.shared for batch in policies[1]._micro_batches(groups, 0) for family in batch.families)
    expected, *found = (gradients(policy, groups)[1] for policy in policies)
    for grads in found:
        for name, value in expected.items():
            torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)


def test_a_loss_with_a_reference_has_a_graph_of_its_own_and_the_same_result():
    options = {"algorithm__kl_loss_coef": 0.1}
    eager, captured = fused_policy(**options), captured_policy(**options)
    groups = random_groups(3, 4, 4, with_reference=True)
    _, expected = gradients(eager, groups)
    found, grads = gradients(captured, groups)
    assert "kl" in found[0][1].metrics
    for name, value in expected.items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)


def test_whole_updates_leave_the_same_weights():
    eager, captured = fused_policy(), captured_policy()
    for step in (1, 2):
        groups = random_groups(step, 6, 4)
        first, second = (policy.update(groups, step, version=0) for policy in (eager, captured))
        assert second.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=1e-4)
    for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_large_micro_batches_are_not_captured():
    policy = captured_policy()
    assert policy.captured is not None
    policy.captured.sizes = [8]
    groups = random_groups(3, 5, 4)
    (batch,) = policy._micro_batches(groups, version=0)
    policy.optimizer.zero_grad_buffers()
    assert policy.captured(batch) is None
    policy._backward(batch)
    assert not policy.captured.captured


def test_the_fused_update_is_that_of_plain_transformers():
    groups = random_groups(3, 5, 4)
    plain_model = for_dapo(tiny_llama())
    plain = Policy(plain_model, config())
    fused = fused_policy()
    first, second = plain.update(groups, 1, 0), fused.update(groups, 1, 0)
    assert second.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=1e-4)
    for one, other in zip(plain_model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
