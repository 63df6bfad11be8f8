"""Test that flat prompts are drawn less often, that all can come back, and that draws are deterministic."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dapo.algorithm.filtering import GroupRules
from dapo.algorithm.ledger import History, Ledger
from tests.make import group

DRAWS = 4000


def group_of(uid, accs, **options):
    made = group([float(bool(acc)) if acc is not None else None for acc in accs], accs=accs, **options)
    return replace(made, prompt=replace(made.prompt, uid=uid))


def share_admitted(ledger: Ledger, uid: str) -> float:
    return float(np.mean([ledger.admits(uid) for _ in range(DRAWS)]))


@pytest.mark.parametrize("explore", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("flat", [0, 1, 2, 10])
def test_each_flat_group_in_a_row_halves_the_chance_and_exploring_ignores_it(explore, flat):
    ledger = Ledger(explore, seed=3)
    for _ in range(flat):
        ledger.record(group_of("p", [False, False]))
    chance = explore + (1 - explore) * 0.5**flat
    three_sigma = 3 * np.sqrt(chance * (1 - chance) / DRAWS)
    assert share_admitted(ledger, "p") == pytest.approx(chance, abs=three_sigma + 1e-12)
    assert share_admitted(ledger, "p") >= explore - three_sigma
    assert share_admitted(ledger, "another") == 1.0


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("is_promising", [True, False])
def test_promising_prompts_are_admitted_with_their_chance_and_others_rarely(is_promising, lookahead):
    ledger = Ledger(0.3, seed=4, lookahead=lookahead)
    ledger.record(group_of("p", [False, False]))
    assert ledger.chance("p") == pytest.approx(0.3 + 0.7 * 0.5)
    chance = ledger.chance("p") if is_promising else 0.3 / lookahead
    share = np.mean([ledger.admits("p", is_promising=is_promising) for _ in range(DRAWS)])
    assert share == pytest.approx(chance, abs=3 * np.sqrt(chance * (1 - chance) / DRAWS))


def test_a_group_with_variance_resets_the_flat_count_but_not_the_pass_rate():
    ledger = Ledger(0.2, seed=0)
    for accs in ([False] * 4, [False] * 4, [True, False, False, False]):
        ledger.record(group_of("p", accs))
    assert ledger.history("p") == History(groups=3, judged=12, right=1, flat_in_a_row=0)
    assert ledger.history("p").pass_rate == 1 / 12
    assert share_admitted(ledger, "p") == 1.0


def test_a_solved_prompt_is_flat_too():
    ledger = Ledger(0.2, seed=0)
    ledger.record(group_of("p", [True, True]))
    assert ledger.history("p") == History(1, 2, 2, 1)


def test_unjudged_and_untrainable_groups_do_not_change_the_history():
    ledger = Ledger(0.2, seed=0)
    ledger.record(group_of("p", [None, True]))
    cut_off = group_of("p", [True, False], cut_off=[True, True], rules=GroupRules(100, overlong_filter=True))
    assert cut_off.verdict == "nothing_to_train"
    ledger.record(cut_off)
    assert ledger.history("p") == History()


def test_without_the_filter_a_group_of_equal_rewards_is_still_flat():
    ledger = Ledger(0.2, seed=0)
    kept = group_of("p", [False, False], rules=GroupRules(100, filter_enabled=False))
    assert kept.kept
    ledger.record(kept)
    assert ledger.history("p").flat_in_a_row == 1


def test_a_restored_ledger_continues_with_the_same_random_numbers():
    first, second = Ledger(0.3, seed=7), Ledger(0.3, seed=7)
    for ledger in (first, second):
        ledger.record(group_of("p", [False, False]))
    draws = [first.admits("p") for _ in range(50)]
    assert [second.admits("p") for _ in range(20)] == draws[:20]
    third = Ledger(0.3, seed=7)
    third.restore(json.loads(json.dumps(second.state())), second.considered)
    assert third.histories == second.histories
    assert [third.admits("p") for _ in range(30)] == draws[20:]
    assert len(set(draws)) == 2
    assert [Ledger(0.3, seed=8).admits("p") for _ in range(50)] != draws
