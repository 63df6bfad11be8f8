import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.overlong import soft_overlong_penalty, target_length_penalty


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)]
)
def test_the_published_buffer(length, penalty):
    assert soft_overlong_penalty(length, 20480, 4096, 1.0) == pytest.approx(penalty, abs=1e-12)


@given(st.integers(1, 300), st.integers(1, 100), st.floats(0.1, 5))
def test_the_penalty_is_the_published_three_case_formula(length, buffer, factor):
    limit = 200
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer * factor
    else:
        expected = -factor
    assert soft_overlong_penalty(length, limit, buffer, factor) == pytest.approx(expected)


@given(st.integers(1, 199))
def test_a_longer_response_never_gains(length):
    assert soft_overlong_penalty(length + 1, 200, 50, 1.0) <= soft_overlong_penalty(length, 200, 50, 1.0)


@pytest.mark.parametrize(
    ("length", "is_cut_off", "share"),
    [
        *((1, False, 0), (150, False, 0), (160, False, 0.1), (175, False, 0.25), (200, False, 0.5), (900, False, 0.5)),
        *((100, True, 0.2), (175, True, 0.45), (900, True, 0.7)),
    ],
)
@pytest.mark.parametrize("reward", [1.0, -1.0, 0.25, 0.0])
def test_past_the_target_length_a_response_loses_a_share_of_its_absolute_reward(reward, length, is_cut_off, share):
    penalty = target_length_penalty(reward, length, 100, is_cut_off=is_cut_off)
    assert penalty == pytest.approx(-abs(reward) * share)
    assert penalty <= 0
