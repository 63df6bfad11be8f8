from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.data.stream import PromptStream, ShuffledSource
from dapo.types import Prompt

SIZES = (7, 3, 5)


def prompts(name, count):
    return [Prompt(f"{name}{i}", (), (i,), i) for i in range(count)]


def stream(weights=(1.0,), seed=0, positions=None):
    sources = [ShuffledSource(prompts("abc"[i], SIZES[i]), seed, i) for i in range(len(weights))]
    made = PromptStream(sources, weights)
    made.positions = list(positions) if positions is not None else made.positions
    return made


def uids(found, count):
    return [prompt.uid for prompt in found.take(count)]


WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=3)


@given(WEIGHTS, st.integers(0, 60), st.lists(st.integers(0, 20), max_size=6), st.integers(0, 5))
def test_the_stream_resumed_at_any_point_continues_exactly_whatever_the_batch_sizes(weights, before, sizes, seed):
    whole = uids(stream(weights, seed), 200)
    first = stream(weights, seed)
    first.take(before)
    resumed = stream(weights, seed, first.positions)
    found = [uid for size in sizes for uid in uids(resumed, size)]
    assert found == whole[before : before + sum(sizes)]
    assert sum(resumed.positions) == before + sum(sizes)


def test_peeking_shows_what_will_be_drawn_and_draws_nothing():
    one, other = stream((2.0, 1.0)), stream((2.0, 1.0))
    one.take(3)
    other.take(3)
    ahead = one.peek(9)
    assert one.positions == other.positions
    assert ahead == one.take(9) == other.take(9)


def test_skipping_a_prompt_draws_it():
    one, other = stream((2.0, 1.0)), stream((2.0, 1.0))
    for _ in range(8):
        one.skip()
        other.take(1)
        assert one.positions == other.positions


def test_every_epoch_has_each_prompt_once_in_a_new_order():
    found = stream()
    epochs = [uids(found, 7) for _ in range(5)]
    assert all(sorted(epoch) == [f"a{i}" for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_in_a_mix_each_source_has_its_own_epochs():
    drawn = [uid for uid in uids(stream((1.0, 1.0)), 42) if uid.startswith("b")]
    assert all(sorted(drawn[i : i + 3]) == ["b0", "b1", "b2"] for i in range(0, 21, 3))


def test_the_order_depends_on_the_seed_and_on_the_source_index():
    assert uids(stream(seed=0), 21) != uids(stream(seed=1), 21)
    same = prompts("a", 7)
    mixed = PromptStream([ShuffledSource(same, 0, 0), ShuffledSource(same, 0, 1)], (1.0, 1.0))
    drawn = uids(mixed, 42)
    assert drawn[::2] != drawn[1::2]


@given(WEIGHTS)
def test_at_every_draw_each_source_is_within_a_draw_or_two_of_its_share(weights):
    found = stream(weights)
    for draws in range(1, 150):
        found.take(1)
        for drawn, weight in zip(found.positions, weights, strict=True):
            assert abs(drawn - draws * weight / sum(weights)) < len(weights)


def test_the_source_furthest_behind_is_drawn_and_the_first_one_on_a_tie():
    assert [uid[0] for uid in uids(stream((1.0, 2.0)), 6)] == ["a", "b", "b", "a", "b", "b"]
    assert Counter(uid[0] for uid in uids(stream((2.0, 1.0, 1.0)), 400)) == {"a": 200, "b": 100, "c": 100}


def test_the_digest_depends_on_all_questions_and_their_order():
    one = stream((1.0, 1.0)).digest
    assert one == stream((1.0, 3.0), seed=4, positions=[3, 9]).digest
    assert one != stream((1.0,)).digest
    swapped = PromptStream([ShuffledSource(prompts("b", 3), 0), ShuffledSource(prompts("a", 7), 0)], (1.0, 1.0))
    assert one != swapped.digest


def test_questions_lists_all_prompts_in_file_order():
    assert [p.uid for p in stream((1.0, 1.0)).questions()] == [p.uid for p in prompts("a", 7) + prompts("b", 3)]


def test_a_stream_has_a_weight_for_every_source():
    with pytest.raises(AssertionError):
        PromptStream([ShuffledSource(prompts("a", 1), 0)], (1.0, 2.0))
