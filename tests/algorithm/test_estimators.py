"""Test the estimators against enumeration, and the bootstrap against scipy."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.estimators import DIFFERENCE_OF_RATES, RATE, estimate, ks, majority, paired_difference, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(outcomes, k):
    k = min(k, len(outcomes))
    subsets = [any(subset) for subset in combinations(outcomes, k)]
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(np.mean(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4000, 1, 1), (4000, 3, 2000), (4096, 2000, 4096), (3000, 2999, 2)])
def test_pass_at_k_is_exact_for_thousands_of_samples(n, c, k):
    none_right = Fraction(1)
    for i in range(k):  # draw k without replacement, all wrong
        none_right *= Fraction(max(n - c - i, 0), n - i)
    assert pass_at_k(n, c, k) == float(1 - none_right)


def test_pass_at_1_is_the_mean_and_k_is_lowered_to_the_number_of_samples():
    assert pass_at_k(8, 3, 1) == 3 / 8
    assert pass_at_k(3, 1, 32) == 1.0
    assert pass_at_k(3, 0, 32) == 0.0


def test_the_ks_are_powers_of_two_and_k_itself():
    assert ks(1) == [1]
    assert ks(32) == [1, 2, 4, 8, 16, 32]
    assert ks(12) == [1, 2, 4, 8, 12]


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=8), st.sampled_from("123"))
def test_the_majority_agrees_with_counting_every_answer(answers, gold):
    right = [answer == gold for answer in answers]
    counts = {answer: answers.count(answer) for answer in "123"}
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most and most > 0]
    expected = winners.count(gold) / len(winners) if winners else 0.0
    assert majority(answers, right) == pytest.approx(expected)
    backwards = majority(answers[::-1], right[::-1])
    assert backwards == pytest.approx(expected)  # the order of the votes does not matter


def test_the_majority_ignores_case_and_surrounding_space():
    assert majority(["Paris", " paris ", "Rome", "Rome", "PARIS"], [True, True, False, False, True]) == 1.0
    assert majority(["0.5", "1/2", "7", "7"], [True, True, False, False]) == 0.0


def test_a_problem_without_an_answer_has_the_wrong_majority():
    assert majority([None, None], [False, False]) == 0.0


def test_the_interval_agrees_with_scipy_within_the_noise_of_resampling():
    values = np.random.default_rng(1).beta(0.4, 0.8, size=60)
    found = estimate(values, resamples=20_000)
    reference = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    )
    # The standard error of a 2.5% quantile of a normal with this spread, for both sides of the comparison.
    noise = reference.standard_error * math.sqrt(0.025 * 0.975 / 20_000) / 0.0584 * math.sqrt(2)
    assert found.value == values.mean()
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=5 * noise)
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=5 * noise)


def test_the_interval_contains_the_true_mean_about_95_percent_of_the_time():
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(400):
        found = estimate(generator.binomial(8, 0.3, size=50) / 8, resamples=500)
        hits += found.low <= 0.3 <= found.high
    assert 0.90 <= hits / 400 <= 0.98


@pytest.mark.parametrize("count", [2, 3, 16, 21, 200])
def test_rates_of_0_and_100_percent_have_the_exact_interval(count):
    for rate in (0.0, 1.0):
        found = estimate([rate] * count, RATE)
        exact = scipy.stats.binomtest(round(rate * count), count).proportion_ci(0.95, method="exact")
        assert found == pytest.approx((rate, exact.low, exact.high), abs=1e-12)
        assert 0.0 <= found.low < found.high <= 1.0


@pytest.mark.parametrize(("rate", "k"), [(0.95, 1), (0.98, 1), (0.99, 4)])
def test_the_interval_contains_a_rate_near_its_end_also_where_all_questions_are_right(rate, k):
    generator = np.random.default_rng(6)
    values = [generator.binomial(k, rate, size=21) / k for _ in range(400)]
    bounded, bare = ([estimate(each, bounds, resamples=500) for each in values] for bounds in (RATE, None))
    hits, hits_bare = (sum(each.low <= rate <= each.high for each in found) for found in (bounded, bare))
    assert hits / 400 >= 0.95
    assert hits_bare / 400 < 0.7, "without the bounds, the interval often has no width"


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rate", [0.7, 0.8, 0.83])
def test_questions_that_are_all_right_rule_out_their_true_rate_in_at_most_one_of_40_tests(rate, k):
    """Some questions are always right and the others never, or all are right in the same share of samples."""
    generator = np.random.default_rng(7)
    mixed = generator.binomial(1, rate, (20_000, 21)).astype(float)
    alike = generator.binomial(k, rate, (20_000, 21)) / k
    for tests in (mixed, alike):
        right = tests[tests.min(axis=1) == 1.0]
        misses = sum(estimate(values, RATE).low > rate for values in right)
        assert misses / len(tests) <= 0.025


@pytest.mark.parametrize(("value", "lowest"), [(0.0, -1.0), (1.0, 0.0), (0.5, 0.0), (0.25, -1.0)])
def test_the_interval_of_equal_values_ends_where_they_would_be_equal_in_one_of_40_tests(value, lowest):
    """The worst case for a mean below has only two values: this one and the lowest."""
    low, high = estimate([value] * 21, (lowest, 1.0))[1:]
    share = (low - lowest) / (value - lowest)
    assert share**21 == pytest.approx(0.025)
    mirrored = estimate([-value] * 21, (-1.0, -lowest))
    assert (-mirrored.high, -mirrored.low) == pytest.approx((low, high))


def test_equal_values_without_bounds_and_values_outside_of_them_leave_the_interval_without_width():
    assert estimate([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    assert estimate([2.0, 2.0, 2.0], RATE) == (2.0, 2.0, 2.0)


def test_equal_differences_of_few_problems_are_not_certain():
    problems = [str(i) for i in range(21)]
    wrong, right = dict.fromkeys(problems, 0.0), dict.fromkeys(problems, 1.0)
    same = paired_difference(right, right, DIFFERENCE_OF_RATES)
    assert same[:3] == pytest.approx((0.0, 0.025 ** (1 / 21) - 1, 1 - 0.025 ** (1 / 21)))
    assert paired_difference(wrong, right, DIFFERENCE_OF_RATES).low == pytest.approx(2 * 0.025 ** (1 / 21) - 1)
    two = paired_difference({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, DIFFERENCE_OF_RATES)
    assert two.low < 0 < two.value


def test_the_interval_is_deterministic_and_independent_of_the_block_size(monkeypatch):
    values = np.random.default_rng(4).random(30)
    whole = estimate(values)
    assert estimate(values) == whole
    monkeypatch.setattr("dapo.algorithm.estimators._MAX_DRAWS_PER_BLOCK", 70)
    assert estimate(values) == whole


def test_one_problem_has_no_interval_and_no_problems_have_no_mean():
    assert estimate([0.5]).value == 0.5
    assert math.isnan(estimate([0.5]).low)
    assert all(math.isnan(value) for value in estimate([]))


def test_the_paired_interval_is_narrower_than_the_unpaired_one_where_problems_are_hard_for_both():
    generator = np.random.default_rng(5)
    hardness = generator.random(80)
    first = {str(i): p for i, p in enumerate(generator.binomial(32, 0.9 * hardness) / 32)}
    second = {str(i): p for i, p in enumerate(generator.binomial(32, 0.9 * hardness + 0.1) / 32)}
    paired = paired_difference(first, second)
    one, two = estimate(list(first.values())), estimate(list(second.values()))
    unpaired = math.hypot(one.high - one.low, two.high - two.low)
    assert paired.value == pytest.approx(two.value - one.value)
    assert paired.high - paired.low < unpaired / 2
    assert paired.low > 0


def test_only_common_problems_are_compared():
    found = paired_difference({"a": 0.0, "b": 1.0, "c": 0.5}, {"b": 0.5, "c": 0.5, "d": 1.0})
    assert (found.value, found.problems) == (-0.25, 2)
    assert paired_difference({"a": 0.0}, {"b": 1.0}).problems == 0
