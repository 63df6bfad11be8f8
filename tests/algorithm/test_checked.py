"""A user's function that returns something wrong is named in one sentence, most often before the run starts."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from dapo.algorithm.checked import checked_advantage, checked_filter, checked_loss, checked_schedule, checked_shaping
from dapo.algorithm.loss import dapo_loss
from dapo.algorithm.ratio import LossConfig
from dapo.config.functions import UserFunction
from dapo.errors import PartError
from tests import make


def sentence(check, function, *arguments):
    with pytest.raises(PartError) as caught:
        check(UserFunction("the.option", "file.py:mine", function), *arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("the.option: file.py:mine ")
    return message.removeprefix("the.option: file.py:mine ")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda rewards: rewards[:1], r"returned shape \[1\] for 4 rewards; expected one number each"),
        (lambda rewards: rewards.mean(), r"returned shape \[\] for 4 rewards"),
        (lambda rewards: None, r"returned shape \[\] for 4 rewards"),
        (lambda rewards: "no", "returned a str; expected one number per reward"),
        (lambda rewards: [10**400] * len(rewards), "returned a list; expected one number per reward"),
        (lambda rewards: torch.tensor(rewards, requires_grad=True), "returned a Tensor; expected one number per"),
        (lambda rewards: rewards / 0, "returned .*(nan|inf).* for the rewards"),
        (lambda rewards: rewards.missing, r"raised AttributeError: .* \(test_checked.py:\d+\)"),
        (lambda rewards, more: rewards, "raised TypeError: .*missing 1 required positional argument: 'more'$"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_a_wrong_advantage_is_refused_at_once(function, expected):
    assert re.match(expected, sentence(checked_advantage, function, 4))


def test_an_advantage_cannot_change_the_rewards():
    def spoil(rewards):
        rewards *= 0
        return rewards

    rewards = np.array([1.0, 2.0])
    checked_advantage(spoil, 2)(rewards)
    assert rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda new, *_: new.sum(), "returned the loss as shape []; expected one value per token, shape [5]"),
        (lambda new, *_: 3.0, "returned the loss as a float"),
        (lambda new, *_: None, "returned the loss as None"),
        (lambda new, *_: new.detach(), "returned a loss that does not depend on the log-probabilities"),
        (
            lambda new, *_: torch.ones(5, requires_grad=True) * 2,
            "returned a loss that does not depend on the log-probabilities",
        ),
        (lambda new, *_: new * 1j, "returned a loss that has no gradient: "),
        (lambda new, *_: (new, {1: new}), "returned a metric named 1; expected names that are text"),
        (lambda new, *_: (new, [1]), "returned a tuple; expected the loss, or the loss and a dictionary of metrics"),
        (lambda new, *_: (new, {"x": 1}), "returned x as a int; expected one value per token"),
        (lambda new, *_: new * float("nan"), "returned a loss that is not finite for finite arguments"),
        (lambda new: new, "raised TypeError: "),
    ],
)
def test_a_wrong_loss_is_refused_at_once(function, expected):
    assert sentence(checked_loss, function, LossConfig()).startswith(expected)


def test_a_user_s_loss_gets_what_a_built_in_one_gets():
    def mine(*arguments):
        loss, metrics = dapo_loss(*arguments)
        return loss, {"ratio": metrics["ratio"]}

    new, old = torch.tensor([-1.0, -2.0, -0.2], requires_grad=True), torch.tensor([-1.2, -1.9, -3.0])
    arguments = new, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1, 1, 2]), LossConfig()
    found, expected = checked_loss(mine, LossConfig()).function(*arguments), dapo_loss(*arguments)
    assert torch.equal(found[0], expected[0])
    assert [*found[1]] == ["loss/ratio"]
    assert torch.equal(found[1]["loss/ratio"], expected[1]["ratio"])


def test_a_loss_cannot_change_the_tensors_of_the_batch():
    def spoil(new, old, advantages, responses, _):
        return (new - old.clamp_(min=-1.0)).exp() * advantages.neg_() * responses.sub_(1)

    new = torch.tensor([-1.5, -2.0, -0.2], requires_grad=True)
    old = new.detach()  # as with an importance correction, where they share their memory
    advantages, responses = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1, 1, 2])
    checked_loss(spoil, LossConfig()).function(new, old, advantages, responses, LossConfig())
    assert new.tolist() == pytest.approx([-1.5, -2.0, -0.2])
    assert advantages.tolist() == [1.0, 1.0, -1.0]
    assert responses.tolist() == [1, 1, 2]


def test_arguments_that_are_not_finite_are_not_the_user_s_fault():
    loss = checked_loss(lambda new, *_: new * 2, LossConfig()).function
    new = torch.tensor([float("nan")], requires_grad=True)
    assert loss(new, torch.zeros(1), torch.ones(1), torch.ones(1, dtype=torch.long), LossConfig())[0].isnan().all()


def test_metrics_of_a_loss_that_come_and_go_are_refused():
    calls = []

    def moody(new, *_):
        calls.append(1)
        return new, {"a" if len(calls) < 2 else "b": new}

    loss = checked_loss(UserFunction("algorithm.loss", "f.py:moody", moody), LossConfig()).function
    with pytest.raises(PartError, match=r"f.py:moody returned metrics \['b'\], but \['a'\] in another call"):
        loss(torch.ones(1, requires_grad=True), torch.zeros(1), torch.ones(1), torch.ones(1).long(), LossConfig())


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (None, "returned None; expected 'kept', or the reason as a string"),
        (True, "returned a bool; expected 'kept'"),
        ("Too Easy", "returned 'Too Easy'; expected 'kept', or a reason of at most 40 lowercase letters"),
        ("unjudged", "returned 'unjudged'; expected"),
        ("a" * 41, "returned 'aaaa"),
    ],
)
def test_a_filter_that_returns_no_verdict_is_refused(verdict, expected):
    decide = lambda function: checked_filter(function)(make.group([1.0, 0.0]))  # noqa: E731
    assert sentence(decide, lambda group: verdict).startswith(expected)


@pytest.mark.parametrize("verdict", ["kept", "too_easy", "no_variance"])
def test_a_filter_may_keep_drop_for_a_reason_of_its_own_or_call_a_group_flat(verdict):
    assert checked_filter(lambda group: verdict)(make.group([1.0, 0.0])) == verdict


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, "returned None for a response of 1 tokens with reward 1.0; expected a finite number"),
        (float("nan"), "returned nan for"),
        (float("-inf"), "returned -inf for"),
        pytest.param(10**400, "returned a int for", id="huge"),
        ("1", "returned a str for"),
    ],
)
def test_a_wrong_length_shaping_is_refused_at_once(result, expected):
    assert sentence(checked_shaping, lambda *_: result, 8).startswith(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda step, total: None, "returned None for step 0 of 9; expected a finite number"),
        (lambda step, total: 1 - step, "returned -7.0 for step 8 of 9; expected a factor of at least 0"),
        (lambda step, total: 1 / step, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_schedule_is_refused_at_once(schedule, expected):
    assert sentence(checked_schedule, schedule, 9).startswith(expected)


def test_numbers_of_numpy_and_torch_are_numbers():
    assert checked_schedule(lambda step, total: torch.tensor(0.5), 9)(0, 9) == 0.5
    assert checked_shaping(lambda *_: np.float32(-0.5), 9)(0.0, 1, 9, False) == -0.5
    assert checked_advantage(lambda rewards: (rewards * 2).tolist(), 2)(np.array([1.0, 0.0])).tolist() == [2.0, 0.0]
