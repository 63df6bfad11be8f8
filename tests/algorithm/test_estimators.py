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

from dapo.algorithm.estimators import estimate, ks, majority, paired_difference, pass_at_k


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
