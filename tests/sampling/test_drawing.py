"""Test which prompts are drawn: revisits, prompts chosen by their forecast, and the state that a resume needs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dapo.algorithm.forecast import project
from dapo.checkpoint.state import TrainerState, from_document, to_document
from dapo.config import Config
from dapo.data.stream import PromptStream, ShuffledSource
from dapo.sampling import drawing
from dapo.sampling.drawing import MIN_BATCHES, PromptDrawer
from dapo.types import Prompt, Score
from tests import make
from tests.sampling import test_inflight as inflight
from tests.sampling import test_strict as strict

BATCH = 4


def drawer_for(prompts=400, features=None, **ledger):
    values = {
        "model": {"path": "tiny"},
        "data": {"train": "none", "train_batch_size": BATCH},
        "algorithm": {"ledger": {"enable": True, **ledger}},
    }
    rows = [Prompt(f"p{i}", (), (i,), answer=i) for i in range(prompts)]
    return PromptDrawer(Config.parse(values), PromptStream([ShuffledSource(rows, 0)]), features)


def outcome(prompt, right, n=8):
    group = make.group([float(i < right) for i in range(n)], accs=[i < right for i in range(n)])
    return replace(group, prompt=prompt)


def test_a_share_of_the_draws_goes_back_to_kept_prompts_and_visits_are_far_apart():
    drawer, seen, pauses = drawer_for(revisit=0.4), {}, []
    for turn in range(390):  # less than an epoch: the stream itself repeats nothing
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        if prompt.uid in seen:
            pauses.append(turn - seen[prompt.uid])
        seen[prompt.uid] = turn
        drawer.record(outcome(prompt, right=prompt.answer % 9))
    assert len(pauses) == drawer.revisited
    assert drawer.revisited / drawer.drawn == pytest.approx(0.4, abs=0.01)
    assert min(pauses) >= MIN_BATCHES * BATCH
    assert not any(prompt.answer % 9 in (0, 8) for prompt in drawer.state().known)  # none or all of 8 right: dropped


def test_prompts_with_a_pass_rate_near_one_half_are_revisited_most():
    drawer, visits, seen = drawer_for(prompts=4000, revisit=0.6), [0] * 9, set()
    for _ in range(3000):
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        visits[prompt.answer % 9] += prompt.uid in seen
        seen.add(prompt.uid)
        drawer.record(outcome(prompt, right=prompt.answer % 9))
    assert visits[0] == visits[8] == 0
    assert visits[4] > 3 * visits[1]
    assert visits[4] > 3 * visits[7]


def test_a_prompt_that_became_flat_is_not_visited_again():
    drawer = drawer_for(revisit=0.5)
    for _ in range(300):
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        drawer.record(outcome(prompt, right=8 if drawer.ledger.history(prompt.uid).groups else 4))
    assert drawer.revisited > 50
    assert all(history.groups <= 2 for history in drawer.ledger.histories.values())


@pytest.mark.parametrize("revisit", [0.25, 0.6])
def test_over_many_epochs_each_prompt_is_known_once_and_its_visits_stay_far_apart(revisit):
    """The stream repeats prompts, too, and a prompt may become flat and teach again."""
    drawer, random = drawer_for(prompts=150, revisit=revisit), np.random.default_rng(0)
    kept, latest, visits = 0, {}, 0
    for _ in range(3000):
        visits = drawer.revisited
        (drawn,) = drawer.draw(1)
        uid = drawn.prompt.uid
        if drawer.revisited > visits:
            assert kept - latest[uid] >= MIN_BATCHES * BATCH
        group = outcome(drawn.prompt, right=int(random.choice([0, 2, 4, 8])))
        drawer.record(group)
        kept += group.kept
        latest[uid] = kept if group.kept else latest.get(uid, 0)
        known = [prompt.uid for prompt in drawer.state().known]
        assert sorted(known) == sorted(u for u, h in drawer.ledger.histories.items() if h.flat_in_a_row == 0)
    assert drawer.revisited > 100


def test_a_checkpoint_that_holds_a_prompt_several_times_counts_its_latest_visit():
    drawer = drawer_for(revisit=0.5)
    prompts = [drawn.prompt for drawn in drawer.draw(MIN_BATCHES * BATCH + 1)]
    drawer.restore(replace(drawer.state(), known=[prompts[0], *prompts]))
    assert drawer.state().known == prompts
    drawer.restore(replace(drawer.state(), known=[*prompts, prompts[0]]))
    assert drawer.state().known == [*prompts[1:], prompts[0]]


def test_without_right_and_wrong_every_kept_prompt_is_worth_a_visit():
    drawer = drawer_for(revisit=0.5)
    for _ in range(200):
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        drawer.record(replace(make.group([0.1, 0.9]), prompt=prompt))
    assert drawer.revisited / drawer.drawn > 0.4


def test_without_revisits_nothing_is_kept_for_them():
    drawer = drawer_for()
    for _ in range(100):
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        drawer.record(outcome(prompt, right=4))
    assert (len(drawer.state().known), drawer.revisited) == (0, 0)


def test_the_weights_undo_what_the_ledger_does_to_the_mix_of_prompts():
    """Draw for a long time: prompt 0 always teaches, prompt 1 is flat in every other group.

    Each draw counts with the inverse of its chance. So weighted, both prompts count the same.
    """
    drawer = drawer_for(prompts=2, explore=0.2)
    plain, weighted, visits = np.zeros(2), np.zeros(2), 0
    for _ in range(6000):
        (drawn,) = drawer.draw(1)
        prompt = drawn.prompt
        plain[prompt.answer] += 1
        weighted[prompt.answer] += 1 / drawn.chance
        visits += prompt.answer
        drawer.record(outcome(prompt, right=8 if prompt.answer and visits % 2 else 4))
    assert plain[1] / plain[0] < 0.85
    assert weighted[1] / weighted[0] == pytest.approx(1, abs=0.05)


def test_corrected_advantages_are_weighted_and_the_batch_keeps_its_size():
    sampler = strict.sampler_for(
        strict.mixed_when(lambda serial: True), "algorithm.ledger={enable: true, correct: true}"
    )
    groups = [replace(make.group([0.0, 1.0], [5, 7]), chance=chance) for chance in (1.0, 0.25, 0.5)]
    weighted = sampler._weighted(groups)
    ratios = [after.advantages[0] / before.advantages[0] for before, after in zip(groups, weighted, strict=True)]
    assert ratios[1] / ratios[0] == pytest.approx(4)
    assert ratios[2] / ratios[0] == pytest.approx(2)
    assert sum(ratios) == pytest.approx(3)  # equal sizes: the mean weight is 1
    off = strict.sampler_for(strict.mixed_when(lambda serial: True), "algorithm.ledger.enable=true")
    assert off._weighted(groups) == groups


@pytest.mark.parametrize("correct", ["revisit: 0.5", "correct: true"])
def test_a_restored_sampler_draws_and_samples_the_same(correct):
    def judge(prompt, rollout):
        return Score(float(rollout.index == 0 and (prompt.answer < 3 or rollout.serial % 2 > 0)))

    options = (f"algorithm.ledger={{enable: true, {correct}}}", "data.gen_batch_size=6")
    one, other = (strict.sampler_for(judge, *options) for _ in range(2))
    one.drawer.least_known = other.drawer.least_known = 3
    for step in range(1, 6):
        inflight.advance(one, step, step - 1)
    document = json.loads(json.dumps(to_document(TrainerState(5, 5, 0, 0, one.state()))))
    del document["format"]
    other.restore(from_document(document).sampler, version=5)
    other.engine.sync_weights(5)
    for step in range(6, 10):
        first, second = (inflight.advance(sampler, step, step - 1) for sampler in (one, other))
        for mine, theirs in zip(first.groups, second.groups, strict=True):
            assert (mine.serial, mine.prompt.uid, mine.chance) == (theirs.serial, theirs.prompt.uid, theirs.chance)
            assert np.array_equal(mine.advantages, theirs.advantages)
            assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(mine.rollouts, theirs.rollouts, strict=True))
    assert (one.drawer.revisited > 0) == ("revisit" in correct)


def difficulty(prompt):
    """Return how many of eight responses to this prompt are right: none or all for two thirds of the prompts."""
    return (0, 8, 8, 4, 8, 5)[prompt.answer % 6]


def never_flat(prompt):
    """Return how many of eight responses are right if none and all become one and seven."""
    return min(max(difficulty(prompt), 1), 7)


def telling(prompts):
    """Return features in which the pass rate is hidden, next to others that mean nothing."""
    random = [np.random.default_rng(prompt.answer).normal(size=40) for prompt in prompts]
    return np.array([[difficulty(p) - 4, *noise] for p, noise in zip(prompts, random, strict=True)])


def draw_and_record(drawer, count, right_of=difficulty):
    """Draw prompts, record a group of each, and return these groups."""
    groups = []
    for drawn in drawer.draw(count):
        groups.append(outcome(drawn.prompt, right=right_of(drawn.prompt)))
        drawer.record(groups[-1], drawn.outlook)
    return groups


def kept_share(drawer, draws, each=8, right_of=difficulty):
    return np.mean([group.kept for _ in range(draws // each) for group in draw_and_record(drawer, each, right_of)])


def test_looking_ahead_draws_more_prompts_that_teach_before_their_first_visit():
    blind, seeing = drawer_for(prompts=6000), drawer_for(prompts=6000, features=telling, lookahead=3, explore=0.1)
    random = drawer_for(
        prompts=6000, lookahead=3, explore=0.1,
        features=lambda prompts: np.array([np.random.default_rng(p.answer).normal(size=40) for p in prompts]),
    )  # fmt: skip
    for drawer in (blind, seeing, random):
        kept_share(drawer, 320)  # to learn from
    assert kept_share(blind, 640) == pytest.approx(1 / 3, abs=0.06)
    assert kept_share(random, 640) == pytest.approx(1 / 3, abs=0.08)  # features that tell nothing do no harm
    assert kept_share(seeing, 640) > 0.65
    assert blind.take_skipped() == 0
    assert 640 < seeing.skipped < 3 * 960
    seeing.restore(seeing.state())  # an undone step counts no prompts
    assert seeing.take_skipped() == 0


def test_looking_ahead_draws_every_prompt_that_it_marks_in_the_order_of_the_stream():
    drawer = drawer_for(prompts=6000, features=telling, lookahead=4, explore=1e-9)
    kept_share(drawer, 160)
    ahead = drawer.stream.peek(40)
    drawn = [each.prompt for each in drawer.draw(10)]
    assert [prompt for prompt in ahead if prompt in drawn] == drawn
    expected = drawer.forecast.predict(project(telling(ahead)))
    assert {p.uid for p in drawn} == {ahead[i].uid for i in np.argsort(np.abs(expected - 0.5))[:10]}


def test_prompts_that_are_not_promising_get_no_larger_weight_if_a_resume_corrects_for_the_ledger():
    """All histories are equal, so all weights would be, too."""
    drawer = drawer_for(features=telling, lookahead=2, explore=1)
    kept_share(drawer, 96, right_of=never_flat)
    assert {each.chance for each in drawer.draw(40)} == {1.0}


def test_features_are_computed_only_of_as_many_prompts_as_can_be_drawn():
    sizes = []

    def counting(prompts):
        sizes.append(len(prompts))
        return telling(prompts)

    drawer = drawer_for(prompts=60, features=counting, lookahead=3, explore=0.1)
    draw_and_record(drawer, 40)
    assert sizes == [40]  # nothing can be chosen yet
    while not drawer.forecast.is_ready:
        draw_and_record(drawer, 10)
    later = []
    for _ in range(10):
        sizes.clear()
        draw_and_record(drawer, 10)
        assert sizes[0] == 30
        later += sizes[1:]
    assert later, "this test needs promising prompts that the ledger does not admit"
    assert max(later) < 30


@pytest.mark.parametrize(("draws", "most"), [(9, 9), (4, 6)])
def test_features_are_computed_of_no_more_prompts_than_there_are_or_must_be_drawn(draws, most):
    sizes = []

    def counting(prompts):
        sizes.append(len(prompts))
        return telling(prompts)

    drawer = drawer_for(prompts=6, features=counting, lookahead=64, explore=0.1)
    while not drawer.forecast.is_ready:
        draw_and_record(drawer, 8)
    sizes.clear()
    draw_and_record(drawer, draws)
    assert max(sizes) == most


@pytest.mark.parametrize("ledger", [{}, {"features": telling, "lookahead": 3}])
def test_the_stream_makes_each_prompt_once_if_the_draw_reaches_it(ledger):
    drawer, made = drawer_for(explore=1, **ledger), []
    (source,) = drawer.stream.sources
    draw = source.draw
    source.draw = lambda position: (made.append(position), draw(position))[1]
    kept_share(drawer, 64)
    assert made == list(range(64))


@pytest.mark.parametrize("lookahead", [3, 8])
def test_a_small_data_set_gives_as_many_distinct_prompts_per_round_as_without_looking_ahead(lookahead):
    def distinct(drawer):
        for _ in range(10):
            draw_and_record(drawer, 8, right_of=lambda prompt: 4)
        return [len({each.prompt.uid for each in drawer.draw(48)}) for _ in range(20)]

    blind = distinct(drawer_for(prompts=100))
    seeing = distinct(drawer_for(prompts=100, features=telling, lookahead=lookahead, explore=0.1))
    assert min(seeing) >= 46  # only prompts that are drawn to explore can come twice
    assert np.mean(seeing) >= np.mean(blind)


def test_prompts_drawn_in_this_round_are_not_promising_when_more_are_looked_at():
    """Most prompts are flat, so that the ledger refuses many promising ones, and further windows follow."""
    drawer = drawer_for(prompts=60, features=telling, lookahead=3, explore=0.02)
    for _ in range(12):
        draw_and_record(drawer, 8)
    rounds = [[each.prompt.uid for each in drawer.draw(20)] for _ in range(60)]
    copies = sum(len(uids) - len(set(uids)) for uids in rounds)
    assert copies == 0


SAMPLERS = {
    "rounds": lambda *options: strict.sampler_for(strict.mixed_when(lambda serial: False), *options),
    "in flight": lambda *options: inflight.sampler_for(lambda i, _: 3 + i % 5, lambda serial: False, *options),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_prompts_of_earlier_rounds_and_in_flight_come_after_all_others_when_looking_ahead(kind):
    sampler = SAMPLERS[kind](
        "algorithm.ledger={enable: true, lookahead: 8, explore: 1e-9}", "data.gen_batch_size=8",
        "algorithm.filter_groups.max_num_gen_batches=4",
    )  # fmt: skip
    sampler.drawer = drawer_for(prompts=60, features=telling, lookahead=8, explore=1e-9)
    for _ in range(12):
        draw_and_record(sampler.drawer, 8, right_of=never_flat)
    sampled = sampler.fill(1, version=0)
    assert len(sampled.groups) == 32
    assert len({group.prompt.uid for group in sampled.groups}) == 32


def test_with_fewer_prompts_than_draws_looking_ahead_draws_all_of_them_about_equally_often():
    drawer = drawer_for(prompts=30, features=telling, lookahead=3, explore=0.1)
    for _ in range(10):
        draw_and_record(drawer, 8, right_of=lambda prompt: 4)
    counts = Counter(each.prompt.uid for each in drawer.draw(48))
    assert len(counts) == 30
    assert max(counts.values()) <= 3


@pytest.mark.parametrize("rights", [(1, 4, 7), (7, 4, 7), (1, 4, 1)])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_what_the_forecast_missed_at_the_last_visit_is_expected_again(weight, rights, monkeypatch):
    """All prompts look alike to the model, and none is flat, so only their own pass rates tell them apart."""
    monkeypatch.setattr(drawing, "_ERROR_SHARE", weight)
    drawer = drawer_for(prompts=90, features=lambda prompts: np.ones((len(prompts), 5)), lookahead=3, explore=0.1)
    visits = np.zeros(3)
    for turn in range(100):
        for group in draw_and_record(drawer, 8, right_of=lambda prompt: rights[prompt.answer % 3]):
            visits[group.prompt.answer % 3] += turn >= 50
    if weight:
        assert visits[1] > 2 * visits[[0, 2]].max()
    else:
        assert visits[1] == pytest.approx(visits.sum() / 3, rel=0.3)


def recorded_rate(scores):
    """Return the number of groups in the forecast after one with these scores, and its pass rate."""
    drawer = drawer_for(features=telling, lookahead=3)
    (drawn,) = drawer.draw(1)
    group = replace(make.group([0.1] * len(scores)), prompt=drawn.prompt, scores=scores)
    drawer.record(group, drawn.outlook)
    return drawer.forecast.count, drawer.forecast.rates


def test_the_pass_rate_of_a_group_is_the_mean_acc_of_its_judged_responses():
    assert recorded_rate((Score(0.1), Score(0.9))) == (0, 0)  # neither right nor wrong
    assert recorded_rate((Score(1.0, acc=True), Score(0.0, acc=False))) == (1, 0.5)
    assert recorded_rate((Score(1.0, acc=0.1), Score(0.0, acc=0.3))) == (1, pytest.approx(0.2))
    assert recorded_rate((Score(1.0, acc=True), Score(None, error="timed out"))) == (1, 1.0)
    assert recorded_rate((Score(None, error="timed out"),) * 2) == (0, 0)


def test_two_groups_of_one_prompt_that_are_in_flight_together_are_both_recorded():
    drawer = drawer_for(prompts=4, features=telling, lookahead=3)
    for drawn in drawer.draw(8):
        drawer.record(outcome(drawn.prompt, right=4), drawn.outlook)
    assert drawer.forecast.count == pytest.approx(8, rel=0.01)


def test_each_outcome_is_recorded_with_the_outlook_of_its_own_prompt():
    options = ("algorithm.ledger={enable: true, lookahead: 2}", "data.gen_batch_size=6")
    sampler = strict.sampler_for(strict.mixed_when(lambda serial: serial % 2 > 0), *options)
    sampler.drawer.features = telling
    recorded, record = [], sampler.drawer.record
    sampler.drawer.record = lambda group, outlook: (recorded.append((group.prompt, outlook)), record(group, outlook))
    inflight.advance(sampler, 1, 0)
    assert len({prompt.uid for prompt, _ in recorded}) > 3
    for prompt, outlook in recorded:
        np.testing.assert_allclose(outlook.features_K, project(telling([prompt]))[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prompt_with_features_that_are_not_finite_has_no_forecast_and_is_promising(bad):
    def broken(prompts):
        return np.where([[prompt.answer % 50 == 0] for prompt in prompts], bad, telling(prompts))

    drawer = drawer_for(prompts=6000, features=broken, lookahead=3, explore=1e-9)
    outcomes = {"right_of": lambda prompt: 4 if difficulty(prompt) == 8 else 8}  # zeros are not forecast near one half
    kept_share(drawer, 320, **outcomes)
    assert np.isfinite(drawer.forecast.predict(project(telling(drawer.stream.peek(9))))).all()
    ahead = drawer.stream.peek(120)
    drawn = drawer.draw(40)
    without = [each.prompt for each in drawn if each.outlook is None]
    assert without == [prompt for prompt in ahead if prompt.answer % 50 == 0]
    assert without
    drawer.features = lambda prompts: np.full((len(prompts), 41), bad)
    assert len(drawer.draw(10)) == 10
    drawer.features = broken
    assert kept_share(drawer, 320, **outcomes) > 0.8


def test_restoring_replaces_all_that_a_drawer_knows_even_after_a_draw_that_failed():
    drawer = drawer_for(prompts=90, features=telling, lookahead=3, explore=0.1)
    for _ in range(12):
        draw_and_record(drawer, 8)
    state = drawer.state()
    expected = [(each.prompt.uid, each.outlook.forecast) for each in drawer.draw(20)]
    for _ in range(4):
        draw_and_record(drawer, 8, right_of=lambda prompt: 8 - difficulty(prompt))
    calls = []

    def failing(prompts):
        calls.append(prompts)
        if len(calls) > 1:
            raise MemoryError
        return telling(prompts)[::-1]

    drawer.features = failing
    with pytest.raises(MemoryError):
        drawer.draw(80)
    drawer.features = telling
    drawer.restore(state)
    assert [(each.prompt.uid, each.outlook.forecast) for each in drawer.draw(20)] == expected
    drawer.restore(drawer_for(prompts=90).state())
    assert (drawer.state().forecast, drawer.state().forecast_errors) == ([], {})


def test_without_looking_ahead_no_forecast_is_kept():
    drawer = drawer_for()
    kept_share(drawer, 16)
    assert drawer.state().forecast == []
    assert drawer.state().forecast_errors == {}
