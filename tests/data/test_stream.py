from hypothesis import given
from hypothesis import strategies as st

from dapo.data.stream import PromptStream
from dapo.types import Prompt

PROMPTS = [Prompt(str(i), (), (i,), i) for i in range(7)]


def uids(stream, count):
    return [prompt.uid for prompt in stream.take(count)]


@given(st.integers(0, 50), st.lists(st.integers(1, 20), max_size=6), st.integers(0, 5))
def test_the_stream_resumed_at_any_point_continues_exactly_whatever_the_batch_sizes(cursor, sizes, seed):
    whole = uids(PromptStream(PROMPTS, seed), 200)
    resumed = PromptStream(PROMPTS, seed, cursor)
    found = [uid for size in sizes for uid in uids(resumed, size)]
    assert found == whole[cursor : cursor + sum(sizes)]
    assert resumed.cursor == cursor + sum(sizes)


def test_every_epoch_holds_each_prompt_once_in_another_order():
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [uids(stream, 7) for _ in range(5)]
    assert all(sorted(epoch) == sorted(p.uid for p in PROMPTS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_another_seed_is_another_order():
    assert uids(PromptStream(PROMPTS, 0), 21) != uids(PromptStream(PROMPTS, 1), 21)
