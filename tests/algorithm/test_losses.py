"""Every named loss against its equation in plain arithmetic, against TRL's own code, and by its properties."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.algorithm.loss import LOSSES, policy_loss, response_mean, token_weight
from dapo.algorithm.ratio import LossConfig
from dapo.config import Config
from dapo.config.training_options import LOSS_SETTINGS

NAMES = [*LOSSES]


def settings_of(name: str) -> tuple[LossConfig, str]:
    """Return the clips and the aggregation that the name of a loss sets."""
    config = Config.parse({"model": {"path": "x"}, "data": {"train": "x"}, "algorithm": {"loss": name}}).algorithm
    return LossConfig(config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c), config.loss_agg_mode


def make(seed: int, spread: float = 0.5, count: int = 4):
    """Return new and old log-probabilities and the advantage of each of some responses."""
    rng = np.random.default_rng(seed)
    responses = []
    for _ in range(count):
        old = rng.uniform(-4, -0.5, rng.integers(1, 6))
        responses.append((old + rng.normal(0, spread, len(old)), old, float(rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0]))))
    return responses


def clip(value, low, high):
    return min(max(value, low), high)


def plain_objective(name, responses, config, mode):
    """Return the loss of a mini-batch, written out from the paper's equation with ordinary arithmetic."""
    low, high, c = config.clip_low, config.clip_high, config.clip_c
    by_response = []
    for new, old, a in responses:
        ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
        if name in ("dapo", "grpo", "dr_grpo"):
            losses = [-min(r * a, clip(r, 1 - low, 1 + high) * a) for r in ratios]
            if c is not None and a < 0:
                losses = [min(loss, -c * a) for loss in losses]
        elif name == "gspo":
            s = math.prod(ratios) ** (1 / len(ratios))
            losses = [-min(s * a, clip(s, 1 - low, 1 + high) * a)] * len(ratios)
        elif name == "gmpo":
            sign = (a > 0) - (a < 0)
            kept = [min(r**sign, clip(r, math.exp(-low), math.exp(high)) ** sign) ** sign for r in ratios]
            losses = [-a * math.prod(kept) ** (1 / len(kept))] * len(kept)
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            losses = [-a * 4 / tau / (1 + math.exp(-tau * (r - 1))) for r in ratios]
        else:
            losses = [-clip(r, 1 - low, 1 + high) * a * n for r, n in zip(ratios, new, strict=True)]
        by_response.append(losses)
    if mode == "token-mean":
        return sum(map(sum, by_response)) / sum(map(len, by_response))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, by_response)) / len(by_response)
    return sum(sum(losses) / len(losses) for losses in by_response) / len(by_response)


def packed(responses, mode):
    new, old = (torch.tensor(np.concatenate([r[i] for r in responses])) for i in (0, 1))
    lengths = [len(r[0]) for r in responses]
    advantages = torch.tensor(np.repeat([r[2] for r in responses], lengths))
    numbers = torch.tensor(np.repeat(np.arange(1, len(lengths) + 1), lengths))
    weights = [token_weight(mode, length, sum(lengths), len(lengths)) for length in lengths]
    return new.requires_grad_(), old, advantages, numbers, torch.tensor(np.repeat(weights, lengths))


def found_objective(name, responses, config, mode):
    new, old, advantages, numbers, weights = packed(responses, mode)
    losses, metrics = policy_loss(new, old, advantages, None, config, numbers, LOSSES[name].function)
    assert all(values.shape == new.shape and not values.requires_grad for values in metrics.values())
    total = (losses * weights).sum()
    return float(total.detach()), torch.autograd.grad(total, new)[0]


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([1e-4, 0.3, 1.5]))
@settings(max_examples=40)
def test_each_loss_agrees_with_its_equation_in_plain_arithmetic(name, seed, spread):
    responses, (config, mode) = make(seed, spread), settings_of(name)
    value, grad = found_objective(name, responses, config, mode)
    assert value == pytest.approx(plain_objective(name, responses, config, mode), rel=1e-12, abs=1e-12)
    if name == "cispo":  # its weight is a constant to the gradient, which differences do not know
        return
    numerical, step = [], 1e-6
    for i, (new, old, a) in enumerate(responses):
        for t in range(len(new)):
            sides = []
            for sign in (1, -1):
                moved = [*responses]
                moved[i] = (new + sign * step * (np.arange(len(new)) == t), old, a)
                sides.append(plain_objective(name, moved, config, mode))
            numerical.append((sides[0] - sides[1]) / (2 * step))
    # A difference across a corner of the clip lies between the slopes of its two sides; such a draw is rare.
    agrees = torch.isclose(grad, torch.tensor(numerical, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert agrees.float().mean() > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_where_the_policy_has_not_moved_every_loss_has_the_policy_gradient(name):
    responses = [(old, old, a) for _, old, a in make(3)]
    config, mode = settings_of(name)
    _, grad = found_objective(name, responses, config, mode)
    _, _, advantages, _, weights = packed(responses, mode)
    torch.testing.assert_close(grad, -advantages * weights, rtol=1e-12, atol=1e-15)


def test_the_gradient_of_cispo_is_the_policy_gradient_weighted_by_the_clipped_ratio():
    responses, (config, mode) = make(5, 3.0), settings_of("cispo")
    _, grad = found_objective("cispo", responses, config, mode)
    new, old, advantages, _, weights = packed(responses, mode)
    ratio = (new.detach() - old).exp()
    assert (ratio > 5).any(), "the clip must act"
    torch.testing.assert_close(grad, -ratio.clamp(max=5) * advantages * weights, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_token_of_one_response_does_not_change_the_loss_of_another(name):
    responses, (config, mode) = make(1, 0.3), settings_of(name)
    new, old, advantages, numbers, _ = packed(responses, mode)
    arguments = (old, advantages, None, config, numbers, LOSSES[name].function)
    before, after = (policy_loss(values, *arguments)[0] for values in (new, new + 0.1 * (numbers == 2)))
    assert torch.equal(before[numbers != 2], after[numbers != 2])


def test_the_mean_over_a_response_is_taken_wherever_its_tokens_are_and_padding_does_not_count():
    numbers = torch.tensor([2, 1, 2, 0, 3])
    assert response_mean(torch.tensor([1.0, 5.0, 3.0, 100.0, 7.0]), numbers).tolist() == [2.0, 5.0, 2.0, 100.0, 7.0]


@pytest.mark.parametrize("name", NAMES)
def test_ratios_that_would_overflow_give_finite_losses_and_gradients(name):
    config, _ = settings_of(name)
    for old, a in ((-1e4, 1.0), (-1e4, -1.0), (0.0, 1.0), (0.0, -1.0)):
        new = torch.tensor([0.0, -1e4], requires_grad=True)
        losses, _ = policy_loss(
            new, torch.full((2,), old), torch.full((2,), a), None, config, loss=LOSSES[name].function
        )
        (grad,) = torch.autograd.grad(losses.sum(), new)
        assert losses.isfinite().all()
        assert grad.isfinite().all()


class OneProcess:
    """The part of accelerate that TRL's loss uses, for one process."""

    num_processes = 1

    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


# Our name -> TRL's options. For CISPO TRL's epsilon_high is the largest ratio itself.
TRL = {
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 10.0},
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "gspo": {
        "loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence",
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
}  # fmt: skip


def trl_loss(name, responses):
    """Return the loss and the gradient of TRL's own function, padded, in float64."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    width = max(len(new) for new, _, _ in responses)

    def padded(rows):
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

    new = padded([r[0] for r in responses]).requires_grad_()
    mask = padded([[1.0] * len(r[0]) for r in responses])
    options = {"epsilon_low": 0.0, "delta": None, "importance_sampling_level": "token", **TRL[name]}
    args = SimpleNamespace(
        delta=options["delta"], sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1
    )
    trainer = SimpleNamespace(
        **options, args=args, accelerator=OneProcess(), beta=0.0, top_entropy_quantile=1.0, aux_loss_enabled=False,
        off_policy_mask_threshold=None, use_vllm=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=100, _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )  # fmt: skip
    empty = torch.zeros(len(responses), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask.long(), "completion_mask": mask,
        "advantages": torch.tensor([r[2] for r in responses], dtype=torch.float64),
        "old_per_token_logps": padded([r[1] for r in responses]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]
    (grad,) = torch.autograd.grad(loss, new)
    return float(loss.detach()), grad[mask.bool()]


@pytest.mark.parametrize("name", TRL)
def test_each_loss_that_trl_has_agrees_with_trl(name):
    config, mode = settings_of(name)
    for seed in range(20):
        responses = make(seed, [3e-4, 0.3, 1.5][seed % 3])
        value, grad = found_objective(name, responses, config, mode)
        expected, expected_grad = trl_loss(name, responses)
        scale = 100 if name == "dr_grpo" else 1  # TRL also divides by max_completion_length
        tolerance = 1e-6 if name == "sapo" else 1e-12  # TRL rounds the temperature 1.05 to float32
        assert value == pytest.approx(expected * scale, rel=tolerance, abs=1e-14)
        torch.testing.assert_close(grad, expected_grad * scale, rtol=tolerance, atol=1e-14)


def test_the_names_of_the_options_are_those_of_the_functions():
    assert [*LOSS_SETTINGS] == NAMES
