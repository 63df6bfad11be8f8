"""Test groups that are sampled in two parts, and prompts that are drawn again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dapo.checkpoint.state import TrainerState, from_document, to_document
from dapo.config import Config
from dapo.data.stream import PromptStream, ShuffledSource
from dapo.sampling.drawing import MIN_BATCHES, PromptDrawer
from dapo.types import Prompt, Score
from tests import make
from tests.sampling import test_inflight as inflight
from tests.sampling import test_strict as strict

# Serial 0, 3, 6, ...: right, right, wrong, ... (a probe of two is flat); 1, 4, ...: mixed at once; 2, 5, ...: flat.
PATTERNS = ((1, 1, 0, 0, 1), (1, 0, 1, 0, 0), (0, 0, 0, 0, 0))
N, PROBE = 5, 2
OPTIONS = (f"rollout.n={N}", f"algorithm.filter_groups.probe={PROBE}")


def judge(prompt, rollout):
    right = bool(PATTERNS[rollout.serial % 3][rollout.index])
    return Score(float(right), acc=right)


def sampled_by(mode, *overrides):
    if mode == "strict":
        return strict.sampler_for(judge, *overrides)
    lengths = lambda serial, index: 1 + (serial * 7 + index * 3) % 11  # noqa: E731
    return inflight.sampler_for(lengths, lambda serial: True, *overrides, judge=make.Scripted(judge))


@pytest.mark.parametrize("mode", ["strict", "inflight"])
def test_a_flat_probe_settles_a_group_and_a_mixed_one_samples_the_rest(mode):
    sampler = sampled_by(mode, *OPTIONS, "data.gen_batch_size=6")
    decided = []
    sampler.on_group = decided.append
    for step in range(1, 9):
        sampled = inflight.advance(sampler, step, step - 1)
        strict.assert_tokens_add_up(sampled.tokens)
        settled = [group for group in sampled.groups if len(group.rollouts) == PROBE and group.serial in sampled.fresh]
        assert sampled.metrics()["groups/settled_early"] == len(settled)
    assert len(decided) > 30
    for group in decided:
        kind = group.serial % 3
        assert [rollout.index for rollout in group.rollouts] == list(range(N if kind == 1 else PROBE))
        assert group.verdict == ("all_right", "kept", "all_wrong")[kind]
        assert [score.acc for score in group.scores] == [bool(v) for v in PATTERNS[kind][: len(group.scores)]]


def test_kept_groups_have_the_tokens_of_whole_groups():
    groups = []
    for options in (OPTIONS, OPTIONS[:1]):
        sampler = sampled_by("strict", *options, "data.gen_batch_size=6", "data.train_batch_size=2")
        groups.append({group.serial: group for group in sampler.fill(1, version=0).batch})
    probed, whole = groups
    assert 1 in probed
    assert 1 in whole
    for mine, theirs in zip(probed[1].rollouts, whole[1].rollouts, strict=True):
        assert np.array_equal(mine.tokens, theirs.tokens)


def test_a_probe_that_cannot_be_judged_settles_nothing():
    def unsure(prompt, rollout):
        return Score(None, error="no") if rollout.index == 0 else Score(float(rollout.index > 1), acc=rollout.index > 1)

    sampler = strict.sampler_for(unsure, *OPTIONS)
    sampled = sampler.fill(1, version=0)
    assert len(sampled.batch) == 4
    assert all(len(group.rollouts) == N for group in sampled.groups)


def test_the_arrival_time_of_probe_scores_changes_nothing():
    def flow(seed):
        sampler = sampled_by("inflight", *OPTIONS, "data.gen_batch_size=6")
        if seed is not None:
            sampler.judge = inflight.Slow(judge, seed)
        return [inflight.serials(inflight.advance(sampler, step, step - 1).batch) for step in range(1, 7)]

    assert flow(None) == flow(1) == flow(2)


def test_the_engine_stays_busy_while_groups_are_probed():
    sampler = sampled_by("inflight", *OPTIONS, "data.gen_batch_size=8", "data.train_batch_size=8")
    inflight.advance(sampler, 1, 0)
    unfinished = sum(group.asked - len(group.rollouts) for group in sampler._unfinished())
    assert unfinished > 0.5 * 8 * N


def test_corrected_advantages_are_weighted_by_the_inverse_chance():
    options = (*OPTIONS, "data.gen_batch_size=6", "data.train_batch_size=2")
    plain, corrected = (
        sampled_by("strict", *options, f"algorithm.correct_sampling={on}").fill(1, version=0).batch
        for on in ("false", "true")
    )
    chance = 1 - (1 + 3) / 10  # two right and three wrong of five: C(2, 2) + C(3, 2) of C(5, 2) probes are flat
    assert [group.chance for group in plain] == pytest.approx([chance, chance])
    for one, other in zip(plain, corrected, strict=True):  # equal chances: the weights are 1
        assert other.advantages == pytest.approx(one.advantages)
    sampler = sampled_by("strict", *options, "algorithm.correct_sampling=true")
    rare, common = (replace(group, chance=c) for group, c in zip(plain, (0.25, 1.0), strict=True))
    weighted = sampler._weighted([rare, common])
    ratios = [after.advantages[0] / before.advantages[0] for before, after in zip(plain, weighted, strict=True)]
    assert ratios[0] / ratios[1] == pytest.approx(4)


def drawer_for(share, prompts=400):
    config = Config.parse(
        {
            "model": {"path": "tiny"},
            "data": {"train": "none", "train_batch_size": 4},
            "algorithm": {"ledger": {"enable": True, "revisit": share}},
        }
    )
    rows = [Prompt(f"p{i}", (), (i,), answer=i) for i in range(prompts)]
    return PromptDrawer(config, PromptStream([ShuffledSource(rows, 0)]))


def decided(prompt, right, n=8):
    group = make.group([float(i < right) for i in range(n)], accs=[i < right for i in range(n)])
    return replace(group, prompt=prompt)


def test_a_share_of_the_draws_goes_back_to_kept_prompts_oldest_first():
    drawer, seen, again = drawer_for(0.5), {}, []
    for turn in range(600):
        ((prompt, chance),) = drawer.draw(1)
        if prompt.uid in seen and turn < 300:
            again.append(turn - seen[prompt.uid])
            assert chance == 1.0
        seen[prompt.uid] = turn
        drawer.record(decided(prompt, right=prompt.answer % 9))  # 0 and 8 of 8: dropped
    assert drawer.revisited / drawer.drawn == pytest.approx(0.5, abs=0.05)
    assert min(again) >= MIN_BATCHES * 4  # visits of one prompt are far apart
    assert not any(prompt.answer % 9 in (0, 8) for prompt in drawer.known)


def test_prompts_with_a_pass_rate_near_one_half_are_revisited_most():
    drawer, visits = drawer_for(0.6, prompts=2000), dict.fromkeys(range(9), 0)
    first = set()
    for _ in range(3000):
        ((prompt, _),) = drawer.draw(1)
        if prompt.uid in first:
            visits[prompt.answer % 9] += 1
        first.add(prompt.uid)
        drawer.record(decided(prompt, right=prompt.answer % 9))
    assert visits[0] == visits[8] == 0
    assert visits[4] > 2 * visits[1]
    assert visits[4] > 2 * visits[7]


def test_without_right_and_wrong_every_kept_prompt_is_worth_a_visit():
    drawer = drawer_for(0.5)
    for _ in range(200):
        ((prompt, _),) = drawer.draw(1)
        drawer.record(replace(make.group([0.1, 0.9]), prompt=prompt))
    assert drawer.revisited / drawer.drawn > 0.4


def test_a_restored_sampler_draws_and_samples_the_same():
    options = (*OPTIONS, "algorithm.ledger={enable: true, revisit: 0.5}", "data.gen_batch_size=6")
    one, other = sampled_by("strict", *options), sampled_by("strict", *options)
    one.drawer.wait = other.drawer.wait = 3
    for step in range(1, 6):
        inflight.advance(one, step, step - 1)
    assert one.drawer.revisited > 0
    state = TrainerState(5, 5, 0, 0, one.state())
    document = json.loads(json.dumps(to_document(state)))
    del document["format"]
    other.restore(from_document(document).sampler, version=5)
    other.engine.sync_weights(5)
    for step in range(6, 9):
        first, second = (inflight.advance(sampler, step, step - 1) for sampler in (one, other))
        for mine, theirs in zip(first.groups, second.groups, strict=True):
            assert (mine.serial, mine.prompt.uid, mine.chance) == (theirs.serial, theirs.prompt.uid, theirs.chance)
            assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(mine.rollouts, theirs.rollouts, strict=True))
