"""Test the weights of groups against brute force over every outcome and every order of a group's responses."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.algorithm.inclusion import inclusion_weights, mixed_probe_chance
from dapo.types import Score
from tests import make


@pytest.mark.parametrize("values", ["aaab", "aabb", "aabbc", "aaaaa", "ab?", "aa??b"])  # ?: unjudged
@pytest.mark.parametrize("probe", [2, 3])
def test_the_chance_is_the_share_of_orders_whose_probe_is_mixed(values, probe):
    orders = [order[:probe] for order in permutations(values)]
    mixed = [len(set(first)) > 1 or "?" in first for first in orders]
    counts = Counter(values.replace("?", "")).values()
    assert mixed_probe_chance([*counts], len(values), probe) == pytest.approx(np.mean(mixed))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_weighted_groups_that_pass_the_probe_add_up_to_all_mixed_groups(p):
    """Sum a statistic over every outcome of five responses, with its probability: with and without the probe."""
    n, probe = 5, 2
    rules = GroupRules(max_response_length=8, probe=probe)
    whole = probed = unweighted = 0.0
    for outcome in product([True, False], repeat=n):
        probability = np.prod([p if right else 1 - p for right in outcome])
        scores = [Score(float(right), acc=right) for right in outcome]
        group = form_group(0, make.prompt(), [make.rollout([7], index=i) for i in range(n)], scores, rules)
        statistic = probability * sum(outcome) ** 2
        if group.kept:
            whole += statistic
            if len(set(outcome[:probe])) > 1:
                probed += statistic / group.chance
                unweighted += statistic
    assert probed == pytest.approx(whole, rel=1e-12)
    assert unweighted < 0.9 * whole


def test_weights_keep_the_size_of_the_batch():
    weights = inclusion_weights([1.0, 0.25, 0.5], [10, 20, 30])
    assert weights[1] / weights[0] == pytest.approx(4)
    assert weights @ [10, 20, 30] == pytest.approx(60)
    assert inclusion_weights([], []).shape == (0,)
