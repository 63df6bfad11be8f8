"""The contract of every engine. The trainer relies on nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dapo.types import Extension, Request, Rollout, SamplingParams
from tests import plain
from tests.engine.conftest import STOP, Subject
from tests.tiny import PAD_ID, SPECIALS, tiny_tokenizer


def drain(engine, *requests) -> dict[tuple[int, int], Rollout]:
    engine.submit(requests)
    return by_key(rest(engine))


def rest(engine) -> list[Rollout]:
    rollouts = []
    while finished := engine.poll():
        rollouts += finished
    return rollouts


def by_key(rollouts: list[Rollout]) -> dict[tuple[int, int], Rollout]:
    found = {(rollout.serial, rollout.index): rollout for rollout in rollouts}
    assert len(found) == len(rollouts), "a rollout came twice"
    return found


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(4, 130, rng.integers(1, longest)).tolist()) for _ in range(count)]


def groups(count, n, params, *, seed=0, first=0):
    return [Request(first + i, prompt, n, params) for i, prompt in enumerate(prompts(count, seed))]


def decode(tokens):
    return tiny_tokenizer().decode(tokens, skip_special_tokens=False)


def greedy(model, prompt, limit):
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": sorted(STOP), "pad_token_id": PAD_ID}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def check_logprobs(subject: Subject, requests, found, temperature=1.0):
    twin = plain.plain_copy(subject.model, torch.float32)
    questions = {request.serial: request.prompt for request in requests}
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, questions[serial], [rollout.tokens.tolist()], temperature)
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=1e-4)


def test_greedy_tokens_are_those_of_transformers_generate(subject):
    requests = [
        Request(i, prompt, 1 + i % 3, SamplingParams(temperature=0, max_tokens=20))
        for i, prompt in enumerate(prompts(8))
    ]
    found = drain(subject.engine, *requests)
    assert len(found) == sum(request.n for request in requests)
    reference = plain.plain_copy(subject.model, torch.float32)
    lengths = set()
    for request in requests:
        expected = greedy(reference, request.prompt, 20)
        lengths.add(len(expected))
        for index in range(request.n):
            assert found[request.serial, index].tokens.tolist() == expected
            assert found[request.serial, index].finish_reason == ("stop" if expected[-1] in STOP else "length")
    assert len(lengths) > 1


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probabilities_are_those_of_the_trained_model_at_the_sampling_temperature(subject, temperature):
    requests = groups(5, 4, SamplingParams(temperature, max_tokens=12), seed=1)
    found = drain(subject.engine, *requests)
    assert len(found) == 20
    check_logprobs(subject, requests, found, temperature)


def test_a_response_ends_with_its_stop_token_or_at_the_limit(subject):
    found = drain(subject.engine, *groups(6, 8, SamplingParams(max_tokens=9), seed=2))
    for rollout in found.values():
        assert rollout.tokens.dtype == np.int32 and rollout.logprobs.dtype == np.float32
        assert len(rollout.logprobs) == len(rollout)
        assert not STOP & set(rollout.tokens[:-1].tolist())
        assert (rollout.finish_reason == "stop") == (rollout.tokens[-1] in STOP)
        assert len(rollout) == 9 or rollout.finish_reason == "stop"
    assert {rollout.finish_reason for rollout in found.values()} == {"stop", "length"}


def test_a_stop_token_at_a_limit_of_one_token_counts_as_stop(subject):
    found = drain(subject.engine, *groups(8, 8, SamplingParams(max_tokens=1), seed=3))
    assert all(len(rollout) == 1 for rollout in found.values())
    assert all((r.finish_reason == "stop") == (r.tokens[0] in STOP) for r in found.values())
    assert {rollout.finish_reason for rollout in found.values()} == {"stop", "length"}


def test_a_response_ends_with_the_token_that_completes_a_stop_string(subject):
    free = drain(subject.engine, *groups(6, 8, SamplingParams(max_tokens=8), seed=12))
    texts = sorted((rollout.text for rollout in free.values()), key=len)[-3:]
    stop = (texts[0][2:4], texts[1][3:6], texts[2][7])
    params = SamplingParams(max_tokens=8, stop=stop)
    reasons = set()
    for few in (6, 1):  # what else is in flight does not matter
        found = drain(subject.engine, *groups(6, 8, params, seed=12)[:few])
        for key, rollout in found.items():
            whole = free[key].tokens.tolist()
            ends = [end for end in range(1, len(whole) + 1) if any(s in decode(whole[:end]) for s in stop)]
            assert rollout.tokens.tolist() == whole[: min([*ends, len(whole)])]
            assert len(rollout.logprobs) == len(rollout)
            assert rollout.finish_reason == ("stop" if ends else free[key].finish_reason)
            assert rollout.text == decode([t for t in rollout.tokens.tolist() if t >= len(SPECIALS)])
            reasons.add((bool(ends), rollout.finish_reason))
    assert reasons >= {(True, "stop"), (False, "length")}
    again = drain(subject.engine, *groups(6, 8, SamplingParams(max_tokens=8), seed=12))
    assert all(np.array_equal(again[key].tokens, free[key].tokens) for key in free)


def test_the_text_is_the_tokens_without_special_ones(subject):
    tokenizer = tiny_tokenizer()
    found = drain(subject.engine, *groups(4, 8, SamplingParams(max_tokens=12), seed=4))
    for rollout in found.values():
        assert rollout.text == tokenizer.decode([t for t in rollout.tokens.tolist() if t >= len(SPECIALS)])


def test_a_serial_draws_the_same_tokens_again_and_other_serials_indices_and_phases_draw_others(subject):
    params = SamplingParams(max_tokens=10)
    (prompt,) = prompts(1, seed=5)
    ask = [Request(7, prompt, 3, params), Request(8, prompt, 3, params)]
    first, again = (drain(subject.engine, *ask) for _ in range(2))
    assert all(np.array_equal(first[key].tokens, again[key].tokens) for key in first)
    other_phase = drain(subject.engine, Request(7, prompt, 3, params, "eval"))
    assert len({tuple(r.tokens.tolist()) for r in [*first.values(), *other_phase.values()]}) == 9


def test_no_rollout_is_lost_or_comes_twice_when_groups_arrive_in_bursts(subject):
    requests = groups(60, 4, SamplingParams(max_tokens=15), seed=6)
    rollouts: list[Rollout] = []
    for start in range(0, len(requests), 12):
        subject.engine.submit(requests[start : start + 12])
        rollouts += subject.engine.poll()
    rollouts += rest(subject.engine)
    assert by_key(rollouts).keys() == {(request.serial, i) for request in requests for i in range(4)}
    assert subject.engine.poll() == []
    check_logprobs(subject, requests[:10], by_key([r for r in rollouts if r.serial < 10]))


def test_a_canceled_group_leaves_and_the_others_are_unaffected(subject):
    requests = groups(6, 4, SamplingParams(max_tokens=40), seed=7)
    expected = drain(subject.engine, *requests)
    subject.engine.submit(requests)
    early = subject.engine.poll()
    missing = {r.serial: r.n - sum(e.serial == r.serial for e in early) for r in requests}
    gone = max(missing, key=lambda serial: missing[serial])
    tokens = subject.engine.cancel([gone])
    assert missing[gone] <= tokens <= sum(len(r) for (serial, _), r in expected.items() if serial == gone)
    assert subject.engine.cancel([gone, 999]) == 0
    late = rest(subject.engine)
    assert gone not in {rollout.serial for rollout in late}
    found = by_key(early + late)
    assert found.keys() - {(gone, i) for i in range(4)} == {key for key in expected if key[0] != gone}
    assert all(np.array_equal(found[key].tokens, expected[key].tokens) for key in found)


def test_everything_can_be_canceled_at_once(subject):
    requests = groups(3, 4, SamplingParams(max_tokens=40), seed=8)
    subject.engine.submit(requests)
    subject.engine.cancel(request.serial for request in requests)
    assert subject.engine.poll() == []
    assert len(drain(subject.engine, *requests)) == 12


def test_a_weight_update_is_visible_in_the_next_sample(subject):
    params = SamplingParams(temperature=0, max_tokens=12)
    long = prompts(1, seed=9, longest=2)[0] * 150  # a prefix cache must not keep any of it
    requests = [*groups(4, 2, params, seed=9), Request(9, long, 2, params)]
    before = drain(subject.engine, *requests)
    subject.change()
    after = drain(subject.engine, *requests)
    assert any(not np.array_equal(before[key].tokens, after[key].tokens) for key in before)
    assert {r.weight_version for r in before.values()} == {subject.version - 1}
    assert {r.weight_version for r in after.values()} == {subject.version}
    assert all(rollout.switches == () for rollout in after.values())
    check_logprobs(subject, requests, after)


def test_rollouts_in_flight_continue_with_the_new_weights_and_record_the_switch(subject):
    requests = groups(8, 8, SamplingParams(max_tokens=200), seed=10)  # more than MAX_CONCURRENT
    subject.engine.submit(requests)
    early = subject.engine.poll()
    subject.change()
    found = by_key(early + rest(subject.engine))
    assert len(found) == 64
    old, new = subject.version - 1, subject.version
    for rollout in found.values():
        assert rollout.weight_version in (old, new)
        assert list(rollout.versions) == sorted(rollout.versions)
    switched = [rollout for rollout in found.values() if rollout.switches]
    assert switched
    assert all(set(rollout.versions) == {old, new} for rollout in switched)


def test_metrics_cover_the_time_since_the_last_call(subject):
    subject.engine.metrics()
    drain(subject.engine, *groups(4, 4, SamplingParams(max_tokens=10), seed=11))
    busy, idle = subject.engine.metrics(), subject.engine.metrics()
    assert 0 < busy["engine/batch_occupancy"] <= 1
    assert (busy["engine/decode_steps"] > 0, idle["engine/decode_steps"]) == (True, 0)


def play(subject: Subject, requests, turns, *, given=lambda key, turn: (5 + turn, 7, 9), limit=200, wait=True):
    """Play episodes to their end: after each turn but the last, the environment gives some tokens."""
    engine, asked = subject.engine, {request.serial: request for request in requests}
    engine.submit(requests)
    found: dict[tuple[int, int], Rollout] = {}
    seen: dict[tuple[int, int], list[Rollout]] = {}
    while len(found) < sum(request.n for request in requests):
        extensions = []
        for rollout in engine.poll(wait=wait):
            key = rollout.serial, rollout.index
            seen.setdefault(key, []).append(rollout)
            tokens = given(key, len(seen[key]))
            if len(seen[key]) == turns or len(rollout) + len(tokens) >= limit:
                found[key] = rollout
                engine.end([key])
            else:
                extensions.append(Extension(asked[rollout.serial], rollout, tokens, limit))
        engine.extend(extensions)
    return found, seen


def episodes(count, n, params, *, seed=0, first=0):
    return [replace(request, turns=True) for request in groups(count, n, params, seed=seed, first=first)]


def check_turns(found, seen, given=lambda key, turn: (5 + turn, 7, 9)):
    """Each turn continues the one before it with what was given, and changes nothing of it."""
    for key, turns in seen.items():
        for turn, (before, after) in enumerate(pairwise(turns), start=1):
            tokens = given(key, turn)
            end = len(before) + len(tokens)
            assert after.tokens[:end].tolist() == [*before.tokens.tolist(), *tokens]
            assert after.logprobs[:end].tolist() == [*before.logprobs.tolist(), *[0.0] * len(tokens)]
            assert after.given == (*before.given, (len(before), end))
            assert len(after) > end
            assert after.text == decode([t for t in after.tokens[end:].tolist() if t >= len(SPECIALS)])
        assert found[key] is turns[-1]


def check_own_logprobs(subject: Subject, requests, found):
    twin = plain.plain_copy(subject.model, torch.float32)
    questions = {request.serial: request.prompt for request in requests}
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, questions[serial], [rollout.tokens.tolist()])
        np.testing.assert_allclose(rollout.logprobs[rollout.is_own], expected.numpy()[rollout.is_own], atol=1e-4)


def test_an_episode_goes_on_with_what_it_was_given_at_the_log_probabilities_of_the_trained_model(subject):
    requests = episodes(5, 4, SamplingParams(max_tokens=12), seed=21)
    found, seen = play(subject, requests, turns=4)
    assert {len(turns) for turns in seen.values()} == {4}
    check_turns(found, seen)
    check_own_logprobs(subject, requests, found)
    assert subject.engine.poll() == []


def test_greedy_turns_are_those_of_transformers_generate(subject):
    requests = episodes(4, 1, SamplingParams(temperature=0, max_tokens=8), seed=22)
    found, seen = play(subject, requests, turns=3)
    check_turns(found, seen)
    reference = plain.plain_copy(subject.model, torch.float32)
    for request in requests:
        rollout = found[request.serial, 0]
        for start, end in rollout.given:
            tokens = [*request.prompt, *rollout.tokens[:end].tolist()]
            rest_of_turn = greedy(reference, tokens, 190 - end)
            until = next((s for s, _ in rollout.given if s > start), len(rollout))
            assert rollout.tokens[end:until].tolist() == rest_of_turn[: until - end]


def test_many_episodes_of_different_lengths_are_all_played_to_their_end(subject):
    def given(key, turn):
        return tuple(range(30, 31 + (key[0] + turn) % 7))

    requests = episodes(20, 4, SamplingParams(max_tokens=30), seed=23)  # more than MAX_CONCURRENT
    found, seen = play(subject, requests, turns=3, given=given, limit=30, wait=False)
    assert len(found) == 80
    check_turns(found, seen, given)
    check_own_logprobs(subject, requests[:4], {key: found[key] for key in found if key[0] < 4})
    # Where a turn is cut off, what is given may leave no room for another one.
    assert min(map(len, seen.values())) < max(map(len, seen.values())) == 3
    assert all(len(rollout) <= 30 for rollout in found.values())


def test_a_turn_may_be_shorter_than_the_episode(subject):
    requests = episodes(3, 4, SamplingParams(max_tokens=3), seed=24)
    found, _ = play(subject, requests, turns=2, limit=12)
    assert any(rollout.finish_reason == "length" and len(rollout) == 12 for rollout in found.values())


def test_a_parked_episode_can_be_canceled_and_the_others_are_unaffected(subject):
    requests = episodes(3, 2, SamplingParams(max_tokens=6), seed=25)

    def second_turn(*, cancels: bool) -> dict:
        """Play on with all but group 1, which is canceled or stays parked: the same batch, so the same rounding."""
        subject.engine.submit(requests)
        first = by_key(rest(subject.engine))
        assert len(first) == 6 and subject.engine.poll() == []
        if cancels:
            lengths = sum(len(rollout) for (serial, _), rollout in first.items() if serial == 1)
            assert subject.engine.cancel([1]) in (0, lengths)
        others = [Extension(requests[key[0]], first[key], (6, 7, 9), 200) for key in first if key[0] != 1]
        subject.engine.extend(others)
        second = by_key(rest(subject.engine))
        assert second.keys() == {key for key in first if key[0] != 1}
        return second

    expected = second_turn(cancels=False)
    subject.engine.end(expected)
    subject.engine.cancel([1])
    found = second_turn(cancels=True)
    assert all(np.array_equal(found[key].tokens, expected[key].tokens) for key in expected)
    subject.engine.end(found)
    assert subject.engine.cancel(range(3)) == 0


def test_an_episode_that_is_not_parked_is_computed_from_its_tokens(subject):
    requests = episodes(3, 2, SamplingParams(max_tokens=6), seed=26)
    expected, seen = play(subject, requests, turns=2)
    subject.engine.extend([Extension(requests[key[0]], turns[0], (6, 7, 9), 200) for key, turns in seen.items()])
    again = by_key(rest(subject.engine))
    assert all(np.array_equal(again[key].tokens, expected[key].tokens) for key in expected)
    subject.engine.end(again)


def test_a_parked_episode_goes_on_with_new_weights_and_records_the_switch(subject):
    requests = episodes(4, 2, SamplingParams(max_tokens=10), seed=27)
    subject.engine.submit(requests)
    first = by_key(rest(subject.engine))
    subject.change()
    subject.change()
    subject.engine.extend([Extension(requests[key[0]], first[key], (6, 7, 9), 60) for key in first])
    second = by_key(rest(subject.engine))
    subject.engine.end(second)
    for key, rollout in second.items():
        seam = len(first[key]) + 3
        assert rollout.weight_version == subject.version - 2
        assert rollout.versions[rollout.is_own].tolist() == [subject.version - 2] * len(first[key]) + [
            subject.version
        ] * (len(rollout) - seam)


def test_the_engine_can_be_suspended_while_episodes_are_parked(subject):
    requests = episodes(3, 2, SamplingParams(max_tokens=6), seed=28)
    expected, _ = play(subject, requests, turns=2)
    subject.engine.submit(requests)
    first = by_key(rest(subject.engine))
    subject.engine.suspend()
    subject.engine.extend([Extension(requests[key[0]], first[key], (6, 7, 9), 200) for key in first])
    second = by_key(rest(subject.engine))
    subject.engine.end(second)
    assert all(np.array_equal(second[key].tokens, expected[key].tokens) for key in expected)
