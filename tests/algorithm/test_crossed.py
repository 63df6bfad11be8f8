"""Differences of two models trained with several seeds: intervals that cover, and corrections that keep their level."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from dapo.algorithm.crossed import clearest_needed, contrast, holm, student_within


def cells(table: np.ndarray) -> dict[tuple[int, str], float]:
    return {(s, f"q{q}"): float(table[s, q]) for s, q in product(range(table.shape[0]), range(table.shape[1]))}


def difference(table: np.ndarray):
    """The contrast of two models whose differences are `table`, seeds x questions."""
    return contrast(cells(np.zeros_like(table)), cells(table))


@pytest.mark.parametrize("freedom", [1.0, 1.7, 2.0, 5.5, 60.0, 1e4])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.96, 4.3, 12.7, 40.0])
def test_students_t_is_that_of_scipy(freedom, t):
    assert student_within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-9)


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
@pytest.mark.parametrize("comparisons", [1, 5, 300])
def test_the_clearest_difference_must_be_that_of_students_t_at_the_level_of_one_comparison(seeds, comparisons):
    needed = clearest_needed(seeds, comparisons, 0.05)
    assert needed == pytest.approx(stats.t.isf(0.05 / comparisons / 2, seeds - 1), rel=1e-6)
    others = [1.0] * (comparisons - 1)
    for factor, is_found in ((1.001, True), (0.999, False)):
        p = 1 - student_within(factor * needed, seeds - 1)
        assert (holm([p, *others])[0] < 0.05) == is_found


def test_the_interval_is_that_of_the_variance_summed_over_pairs_of_dependent_cells():
    """The plain definition: add up the products of all pairs of cells that share a seed or a question."""
    rng = np.random.default_rng(3)
    table = rng.normal(0.1, 1, (4, 7)) + rng.normal(0, 2, (4, 1)) + rng.normal(0, 2, (1, 7))
    count, errors = table.size, table - table.mean()
    seeds, questions = (
        sum(errors[a] * errors[b] for a in np.ndindex(4, 7) for b in np.ndindex(4, 7) if a[side] == b[side]) / count**2
        for side in (0, 1)
    )
    alone = sum(errors[a] ** 2 for a in np.ndindex(4, 7)) / count**2
    parts = (seeds * 4 / 3, 3), (questions * 7 / 6, 6), (alone * count / (count - 1), count - 1)
    assert parts[0][0] > parts[2][0] < parts[1][0]  # neither is cut
    variance = parts[0][0] + parts[1][0] - parts[2][0]
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    low, high = stats.t.interval(0.95, freedom, table.mean(), math.sqrt(variance))
    assert difference(table)[:3] == pytest.approx((table.mean(), low, high), rel=1e-6)
    assert freedom > 3  # so the p-value has those of the four seeds
    assert difference(table).p == pytest.approx(2 * stats.t.sf(abs(table.mean()) / variance**0.5, 3), rel=1e-6)


@pytest.mark.parametrize(
    ("of_seed", "of_question", "alone", "is_nested"),
    [(0, 0.1, 0.4, False), (0, 0, 0.4, False), (0.04, 0.1, 0.4, False), (0.1, 0.1, 0.4, False), (0.05, 0, 0.01, False),
     (0.04, 0, 0.4, True)],
)  # fmt: skip
def test_three_seeds_cover_the_truth_about_as_often_as_promised(of_seed, of_question, alone, is_nested):
    rng, hits, trials, truth = np.random.default_rng(0), 0, 250, 0.05
    for _ in range(trials):
        table = truth + of_seed * rng.standard_normal((3, 1)) + of_question * rng.standard_normal((1, 100))
        found = cells(table + alone * rng.standard_normal((3, 100)))
        if is_nested:  # each seed has its own questions, as reasoning-gym generates them
            found = {(seed, f"{seed} {question}"): value for (seed, question), value in found.items()}
        _, low, high, *_ = contrast(dict.fromkeys(found, 0.0), found)
        hits += low <= truth <= high
    assert 0.9 <= hits / trials <= 0.995


@pytest.mark.parametrize(("seeds", "arms", "of_seed"), [(2, 5, 0.06), (3, 9, 0.06)])
def test_arms_that_do_not_differ_are_rarely_said_to(seeds, arms, of_seed):
    """With the interval's own degrees of freedom, 8 to 40% of these ablations had a false finding."""
    rng, false, trials = np.random.default_rng(7), 0, 60

    def arm() -> dict[tuple[int, str], float]:
        by_seed, by_question = of_seed * rng.standard_normal((seeds, 1)), 0.05 * rng.standard_normal((1, 150))
        return cells(by_seed + by_question + 0.3 * rng.standard_normal((seeds, 150)))

    for _ in range(trials):
        reference = arm()
        false += min(holm([contrast(reference, arm()).p for _ in range(arms)])) < 0.05
    assert false <= 0.05 * trials + 3  # binomial: exceeded once in 30 at exactly 5%


def test_a_large_difference_is_found_with_three_seeds_and_nine_arms():
    rng = np.random.default_rng(8)
    tables = [0.3 * rng.standard_normal((3, 150)) + 0.01 * rng.standard_normal((3, 1)) for _ in range(9)]
    tables[4] += 0.5
    assert [p < 0.05 for p in holm([difference(table).p for table in tables])] == [i == 4 for i in range(9)]


@pytest.mark.parametrize(("value", "shape"), [(1.0, (2, 1)), (-1.0, (3, 50)), (1 / 3, (3, 50)), (0.1, (1, 7))])
def test_equal_differences_are_no_evidence_even_where_their_mean_rounds(value, shape):
    found = difference(np.full(shape, value))
    assert found[:3] == (value, value, value)
    assert math.isnan(found.p)


def test_seeds_and_questions_whose_errors_cancel_count_as_much_as_independent_cells():
    """Their own variances are 0 here, so only the floor at that of the cells is left."""
    table = np.random.default_rng(2).normal(0, 1, (3, 8))
    table += 0.2 + table.mean() - table.mean(0) - table.mean(1, keepdims=True)
    low, high = stats.t.interval(0.95, 23, 0.2, table.std(ddof=1) / math.sqrt(24))
    assert difference(table)[:3] == pytest.approx((0.2, low, high), rel=1e-6)


def test_only_common_seeds_and_questions_count():
    first = {(0, "a"): 0.0, (0, "b"): 1.0, (1, "a"): 0.5, (2, "c"): 1.0}
    second = {(0, "a"): 1.0, (0, "b"): 1.0, (1, "a"): 1.0, (3, "c"): 0.0}
    assert contrast(first, second).value == pytest.approx(0.5)
    assert math.isnan(contrast(first, {}).value)
    assert contrast(first, {(2, "c"): 0.25})[:1] == (-0.75,)
    assert math.isnan(contrast(first, {(2, "c"): 0.25}).p)


def test_equal_models_differ_by_exactly_nothing():
    assert difference(np.zeros((3, 50))) == (0.0, 0.0, 0.0, 1.0, 3)


def test_one_seed_has_the_interval_over_questions_and_no_p_value():
    table = np.random.default_rng(1).normal(0.2, 1, (1, 80))
    low, high = stats.t.interval(0.95, 79, table.mean(), table.std(ddof=1) / math.sqrt(80))
    assert difference(table)[:3] == pytest.approx((table.mean(), low, high), rel=1e-6)
    assert math.isnan(difference(table).p) and math.isnan(difference(table + 9).p)
    assert math.isnan(difference(np.zeros((1, 80))).p)


def test_holm_rejects_what_the_step_down_procedure_rejects():
    rng = np.random.default_rng(5)
    for _ in range(200):
        p_values = list(rng.uniform(0, 0.06, rng.integers(1, 8)))
        rejected = set()
        for rank, index in enumerate(np.argsort(p_values)):
            if p_values[index] >= 0.05 / (len(p_values) - rank):
                break
            rejected.add(index)
        assert {i for i, p in enumerate(holm(p_values)) if p < 0.05} == rejected
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, math.nan]) == pytest.approx([0.01, math.nan], nan_ok=True)
