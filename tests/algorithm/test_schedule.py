import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from dapo.algorithm.schedule import SCHEDULES, learning_rate_factor


def factors(name, warmup, total):
    return [learning_rate_factor(step, warmup, total, SCHEDULES[name]) for step in range(1, total + 1)]


def test_the_warm_up_rises_to_1_and_a_constant_rate_stays_there():
    assert factors("constant", 4, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors("constant", 0, 2) == [1, 1]
    assert factors("linear", 4, 3) == [0.25, 0.5, 0.75]  # the run ends before the warm-up does


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 10), (1, 2)])
def test_after_the_warm_up_the_rates_are_those_of_transformers(name, theirs, warmup, total):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = theirs(optimizer, warmup, total)
    expected = []
    for _ in range(total):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = factors(name, warmup, total)
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    assert all(factor > 0 for factor in found)  # unlike theirs, no step of the warm-up has a rate of 0
