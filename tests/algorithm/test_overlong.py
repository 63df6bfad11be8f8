import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.overlong import soft_overlong_penalty


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
