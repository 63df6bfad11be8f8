import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.advantage import centered, group_advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(rewards)
def test_advantages_agree_with_the_standard_library(values):
    found = group_advantages(np.array(values))
    if max(values) == min(values):
        assert (found == 0).all()
        return
    mean, std = statistics.fmean(values), statistics.stdev(values)
    np.testing.assert_allclose(found, [(value - mean) / (std + 1e-6) for value in values], atol=1e-9, rtol=1e-9)


@given(rewards, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(values, shift):
    if max(values) - min(values) < 1e-3:
        return
    np.testing.assert_allclose(
        group_advantages(np.array(values) + shift), group_advantages(np.array(values)), atol=1e-6
    )


def test_equal_rewards_give_exactly_zero_even_where_their_mean_rounds():
    values = np.full(7, 0.1)
    assert values.std(ddof=1) > 0  # the plain formula would divide by this rounding error
    assert (group_advantages(values) == 0).all()


def test_unjudged_rollouts_are_outside_the_statistics_and_get_zero():
    found = group_advantages(np.array([1.0, np.nan, 0.0, 1.0]))
    np.testing.assert_array_equal(found[[0, 2, 3]], group_advantages(np.array([1.0, 0.0, 1.0])))
    assert found[1] == 0


def test_without_normalization_the_rewards_are_only_centered():
    np.testing.assert_allclose(group_advantages(np.array([3.0, 0.0, 0.0]), centered), [2.0, -1.0, -1.0])
