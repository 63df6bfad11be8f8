import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.loss import LossConfig, kl_k3, policy_loss, token_weight

logprob = st.floats(-30, 0)
advantage = st.floats(-4, 4)
tokens = st.lists(st.tuples(logprob, logprob, advantage, logprob), min_size=1, max_size=20)


def reference_loss(new, old, a, ref, low, high, c, kl):
    """The definition, one token at a time, with ordinary arithmetic."""
    ratio = math.exp(min(20.0, max(-20.0, new - old)))
    loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
    if c is not None and a < 0:
        loss = min(loss, -c * a)
    delta = min(20.0, max(-20.0, ref - new))
    return loss + kl * (math.exp(delta) - delta - 1)


def columns(rows):
    return torch.tensor(rows, dtype=torch.float64).T


@given(tokens, st.sampled_from([None, 3.0, 10.0]), st.sampled_from([0.0, 0.5]))
def test_the_loss_agrees_with_the_definition(rows, c, kl):
    config = LossConfig(0.2, 0.28, c, kl)
    loss, _ = policy_loss(*columns(rows), config)
    expected = [reference_loss(*row, 0.2, 0.28, c, kl) for row in rows]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@given(tokens)
def test_the_gradient_agrees_with_a_numerical_one(rows):
    new, old, a, ref = columns(rows)
    # Away from the corners, where one-sided derivatives differ.
    ratio = (new - old).exp()
    corners = torch.tensor([0.8, 1.28, 10.0], dtype=torch.float64)
    near = ((ratio[:, None] - corners).abs() < 1e-4).any(1) | ((new - old).abs() > 15) | ((ref - new).abs() > 15)
    new = new.clone().requires_grad_()
    config = LossConfig(kl_coef=0.1)
    loss, _ = policy_loss(new, old, a, ref, config)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    step = 1e-6
    above, below = (policy_loss(new.detach() + s, old, a, ref, config)[0] for s in (step, -step))
    numerical = (above - below) / (2 * step)
    torch.testing.assert_close(grad[~near], numerical[~near], rtol=1e-4, atol=1e-6)


@given(tokens)
def test_for_a_negative_advantage_the_upper_clip_is_never_selected(rows):
    new, old, a, _ = columns(rows)
    a = -a.abs()
    low_only, _ = policy_loss(new, old, a, None, LossConfig(0.2, 0.2))
    higher, _ = policy_loss(new, old, a, None, LossConfig(0.2, 5.0))
    assert torch.equal(low_only, higher)


def test_clip_higher_lets_an_unlikely_good_token_rise_further():
    new, old = torch.tensor([math.log(1.25)], requires_grad=True), torch.zeros(1)
    grads = []
    for high in (0.2, 0.28):
        loss, metrics = policy_loss(new, old, torch.ones(1), None, LossConfig(0.2, high))
        grads.append(float(torch.autograd.grad(loss.sum(), new)[0]))
        assert float(metrics["clip_fraction/high"]) == (high == 0.2)
    assert grads == [0.0, pytest.approx(-1.25)]


def test_each_clip_is_counted_on_its_own_side():
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 50.0]))
    a = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    _, metrics = policy_loss(new, torch.zeros(5), a, None, LossConfig())
    assert metrics["clip_fraction/high"].tolist() == [1, 0, 0, 0, 0]
    assert metrics["clip_fraction/low"].tolist() == [0, 0, 0, 1, 0]
    assert metrics["clip_fraction/dual"].tolist() == [0, 0, 0, 0, 1]


def test_k3_is_an_unbiased_estimate_of_the_kl_divergence():
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    expectation = (policy.exp() * kl_k3(policy, reference)).sum()
    exact = torch.nn.functional.kl_div(reference, policy, reduction="sum", log_target=True)
    torch.testing.assert_close(expectation, exact)


def test_extreme_log_probabilities_stay_finite():
    loss, _ = policy_loss(
        torch.tensor([0.0]), torch.tensor([-1e4]), torch.ones(1), torch.tensor([-1e4]), LossConfig(kl_coef=1)
    )
    assert torch.isfinite(loss).all()


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=6))
def test_weights_sum_to_the_three_aggregations(losses):
    total_tokens = sum(len(row) for row in losses)

    def aggregate(mode):
        return sum(token_weight(mode, len(row), total_tokens, len(losses)) * sum(row) for row in losses)

    assert aggregate("token-mean") == pytest.approx(sum(map(sum, losses)) / total_tokens)
    assert aggregate("seq-mean-token-sum") == pytest.approx(sum(map(sum, losses)) / len(losses))
    expected = sum(sum(row) / len(row) for row in losses) / len(losses)
    assert aggregate("seq-mean-token-mean") == pytest.approx(expected)
