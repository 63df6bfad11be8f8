"""The decoder for GPUs, tested on a CPU with the PyTorch twins of its kernels: pages, bursts, and preemption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo.engine.embedded import step
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.embedded.paged import BURST, PagedDecoder
from dapo.errors import ModelError
from dapo.kernels.piece_attention import PAGE
from dapo.model import trunk
from dapo.model.attention import ATTENTION_NAME
from dapo.model.graphs import GraphPool
from dapo.types import Extension, Request, SamplingParams
from tests import plain
from tests.engine.conftest import Subject
from tests.engine.test_contract import check_turns, drain, play
from tests.graphs import capture
from tests.tiny import EOS_ID, tiny_llama, tiny_tokenizer


def paged_engine(model, *, stop=(EOS_ID,), max_concurrent=64, max_length=400, pages=400):
    model.set_attn_implementation(ATTENTION_NAME)
    engine = EmbeddedEngine(model, tiny_tokenizer(), frozenset(stop), 0, max_concurrent)
    engine.decoder = PagedDecoder(model, frozenset(stop), max_concurrent, max_length, pages)
    return engine


def prompt(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(4, 130, length).tolist())


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The number of tokens in each forward pass of the test."""
    counts = []
    hidden = trunk.PlainTrunk.hidden

    def counting(self, tokens_T, *args, **kwargs):
        counts.append(len(tokens_T))
        return hidden(self, tokens_T, *args, **kwargs)

    monkeypatch.setattr(trunk.PlainTrunk, "hidden", counting)
    return counts


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE + 1])
def test_prompts_and_responses_may_end_anywhere_in_a_page(length):
    model = tiny_llama()
    twin = plain.plain_copy(model, torch.float32)
    question = prompt(length)
    limit = PAGE + 7
    found = drain(paged_engine(model, stop=()), Request(0, question, 3, SamplingParams(max_tokens=limit)))
    for rollout in found.values():
        assert len(rollout) == limit
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, question, [rollout.tokens.tolist()])
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=2e-5)


def test_the_prompt_of_a_group_is_computed_and_stored_once(computed):
    model = tiny_llama()
    engine = paged_engine(model, stop=())
    first, second = prompt(PAGE + 10), prompt(30, seed=1)
    params = SamplingParams(max_tokens=3)
    engine.submit([Request(0, first, 5, params), Request(1, second, 5, params), Request(2, first, 5, params)])
    free = len(engine.decoder.store.free)
    with torch.no_grad():
        engine._start_waiting()
    assert computed[0] == (PAGE + 9) + 29  # all but the last tokens, once
    assert computed[1:] == [16] * 3  # fifteen responses, padded to the next batch size
    assert free - len(engine.decoder.store.free) == (2 + 1) + 15  # pages of the two prompts, and one for each response
    while engine.poll():
        pass
    assert len(engine.decoder.store.free) == free
    assert sorted(engine.decoder.free_rows) == list(range(1, 65))


def expect_short(engine) -> None:
    """Make the engine expect that responses are short, so that it starts more than fit to their ends."""
    engine.decoder.ended = 1e9


def test_responses_wait_for_the_pages_that_they_can_be_expected_to_need():
    requests = [Request(i, prompt(10, seed=i), 4, SamplingParams(max_tokens=3 * PAGE)) for i in range(4)]
    greedy, careful = (paged_engine(tiny_llama(), stop=(), max_concurrent=16, pages=1 + 13) for _ in range(2))
    expect_short(greedy)
    sampled = [drain(engine, *requests) for engine in (greedy, careful)]
    assert all(np.array_equal(sampled[0][key].tokens, sampled[1][key].tokens) for key in sampled[0])
    assert 2 * careful.decoder.restarts < greedy.decoder.restarts
    assert careful.decoder.ended == 16 and careful.decoder.ended_tokens == 16 * 3 * PAGE


def test_when_pages_run_out_the_youngest_restart_and_every_rollout_is_the_same():
    model = tiny_llama()
    params = SamplingParams(max_tokens=3 * PAGE)
    requests = [Request(i, prompt(10, seed=i), 4, params) for i in range(4)]
    roomy = drain(paged_engine(model, stop=()), *requests)
    engine = paged_engine(model, stop=(), max_concurrent=8, pages=1 + 14)
    expect_short(engine)
    tight = drain(engine, *requests)
    assert engine.metrics()["engine/restarts"] > 0
    assert tight.keys() == roomy.keys()
    for key, rollout in roomy.items():
        assert np.array_equal(tight[key].tokens, rollout.tokens)
        np.testing.assert_allclose(tight[key].logprobs, rollout.logprobs, atol=1e-5)
    assert len(engine.decoder.store.free) == 14


def test_the_prompt_of_preempted_responses_gives_its_pages_back():
    model = tiny_llama()
    params = SamplingParams(max_tokens=2 * PAGE)
    requests = [Request(i, prompt(2 * PAGE + 1, seed=i), 2, params) for i in range(4)]
    roomy = drain(paged_engine(model, stop=()), *requests)
    engine = paged_engine(model, stop=(), max_length=4 * PAGE + 1, pages=1 + 7)
    expect_short(engine)
    tight = drain(engine, *requests)
    assert engine.metrics()["engine/restarts"] > 0
    assert all(np.array_equal(tight[key].tokens, roomy[key].tokens) for key in roomy)
    assert len(engine.decoder.store.free) == 7


def test_a_prompt_whose_responses_all_wait_gives_its_pages_to_one_that_needs_them():
    """The cache holds the longest sequence, but not next to another prompt whose responses wait."""
    model = tiny_llama()
    long = Request(0, prompt(2), 1, SamplingParams(max_tokens=4 * PAGE - 1))
    short = Request(1, prompt(2 * PAGE + 1, seed=1), 2, SamplingParams(max_tokens=PAGE - 4))
    roomy = drain(paged_engine(model, stop=()), long, short)
    engine = paged_engine(model, stop=(), max_concurrent=2, max_length=4 * PAGE, pages=1 + 6)
    expect_short(engine)
    engine.submit([long, short])
    first = engine.poll()
    assert (len(first), len(engine.active), len(engine.waiting)) == (1, 1, 1)
    assert engine.waiting[0].prompt.cached, "this test needs a prompt that is cached only for a waiting response"
    tight = {(rollout.serial, rollout.index): rollout for rollout in [*first, *drain(engine).values()]}
    assert tight.keys() == roomy.keys()
    for key, rollout in roomy.items():
        assert np.array_equal(tight[key].tokens, rollout.tokens)
    assert len(engine.decoder.store.free) == 6


def test_a_single_response_that_just_fits_is_decoded_to_its_end():
    model = tiny_llama()
    engine = paged_engine(model, stop=(), max_length=PAGE + 40, pages=1 + 3)
    found = drain(engine, *(Request(i, prompt(PAGE, seed=i), 2, SamplingParams(max_tokens=41)) for i in range(2)))
    assert all(len(rollout) == 41 for rollout in found.values())


def test_finished_rows_are_replaced_between_bursts_and_metrics_report_the_occupancy():
    model = tiny_llama()
    engine = paged_engine(model, stop=(), max_concurrent=4)
    lengths = [3, 9, 17, 40, 5, 5, 30, 2]
    requests = [Request(i, prompt(6), 1, SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)]
    found = drain(engine, *requests)
    assert [len(found[i, 0]) for i in range(len(lengths))] == lengths
    metrics = engine.metrics()
    assert metrics["engine/batch_occupancy"] == sum(lengths) / (4 * metrics["engine/decode_steps"])
    assert metrics["engine/decode_steps"] <= 2 * 40 + 2 * BURST
    assert 0 < metrics["engine/kv_occupancy"] < 1
    assert engine.metrics()["engine/decode_steps"] == 0


def test_responses_in_flight_continue_with_new_weights_and_record_the_switch():
    model = tiny_llama()
    params = SamplingParams(max_tokens=3 * BURST)
    request = Request(0, prompt(12), 2, params)
    untouched = drain(paged_engine(model, stop=()), request)
    engine = paged_engine(model, stop=(), max_concurrent=2)
    engine.submit([request, Request(1, prompt(12), 2, params)])
    with torch.no_grad():
        engine._start_waiting()
        model.lm_head.weight.mul_(-1)
    engine.sync_weights(1)
    found = {}
    while finished := engine.poll():
        found |= {(r.serial, r.index): r for r in finished}
    for index in range(2):
        rollout = found[0, index]
        assert (rollout.weight_version, rollout.switches) == (0, (BURST,))
        assert rollout.versions.tolist() == [0] * BURST + [1] * (2 * BURST)
        assert np.array_equal(rollout.tokens[:BURST], untouched[0, index].tokens[:BURST])
        assert not np.array_equal(rollout.tokens, untouched[0, index].tokens)
        assert (found[1, index].weight_version, found[1, index].switches) == (1, ())
    assert all((r.versions == 1).all() for (serial, _), r in found.items() if serial == 1)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.7}, {"top_k": 3}])
def test_evaluation_may_be_greedy_or_truncated(params):
    model = tiny_llama()
    request = Request(0, prompt(9), 4, SamplingParams(max_tokens=12, **params))
    model.set_attn_implementation(ATTENTION_NAME)
    eager = drain(EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), 0, 64), request)
    paged = drain(paged_engine(model), request)
    assert all(np.array_equal(eager[key].tokens, paged[key].tokens) for key in eager)


def test_the_cache_can_be_released_between_rounds():
    model = tiny_llama()
    request = Request(0, prompt(PAGE + 5), 3, SamplingParams(max_tokens=PAGE + 9))
    engine = paged_engine(model, stop=())
    before = drain(engine, request)
    storage = engine.decoder.store.storage
    assert engine.cache_bytes == storage.untyped_storage().nbytes() > 0
    engine.suspend()
    assert storage.untyped_storage().nbytes() == 0
    after = drain(engine, request)
    assert all(np.array_equal(before[key].tokens, after[key].tokens) for key in before)


def test_a_cache_whose_memory_was_taken_meanwhile_comes_back_smaller(monkeypatch):
    engine = paged_engine(tiny_llama(), stop=())
    request = Request(0, prompt(PAGE + 5), 3, SamplingParams(max_tokens=PAGE + 9))
    before, pages = drain(engine, request), engine.decoder.store.storage.shape[2]
    allocate, limit = torch.Tensor.new_zeros, [pages * 2 // 3]

    def little_memory(self, *shape):
        if shape[2] > limit[0]:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return allocate(self, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", little_memory)
    engine.suspend()
    after = drain(engine, request)
    assert engine.decoder.store.storage.shape[2] <= limit[0] and engine.decoder.store.used == 0
    assert all(np.array_equal(before[key].tokens, after[key].tokens) for key in before)
    limit[0] = 2
    engine.suspend()
    with pytest.raises(ModelError, match=r"no memory left for a key/value cache of \d+ tokens, which one response"):
        drain(engine, request)


def crowded():
    """Return an engine in which the responses of group 1 have just been preempted in favor of group 0."""
    engine = paged_engine(tiny_llama(), stop=(), max_concurrent=4, pages=1 + 5)
    expect_short(engine)
    params = SamplingParams(max_tokens=3 * PAGE)
    engine.submit([Request(i, prompt(10), 2, params) for i in range(2)])
    with torch.no_grad():
        while engine.decoder.restarts == 0:
            engine.decoder.advance()
            engine._start_waiting()
            engine._requeue(engine.decoder.take_preempted())
    return engine


def test_a_preempted_response_can_be_canceled():
    engine = crowded()
    assert {response.request.serial for response in engine.waiting} == {1}
    engine.cancel([1])
    found = []
    while finished := engine.poll():
        found += finished
    assert {rollout.serial for rollout in found} == {0}


def test_a_preempted_response_restarts_from_a_prompt_prefilled_with_the_new_weights():
    engine = crowded()
    (old,) = {response.prompt for response in engine.active}
    engine.sync_weights(1)
    with torch.no_grad():
        engine.decoder.model.lm_head.weight.mul_(0.5)
    preempted = [*engine.waiting]
    assert all(response.prompt is not old for response in preempted)
    found = {}
    while finished := engine.poll():
        found |= {(rollout.serial, rollout.index): rollout for rollout in finished}
    twin = plain.plain_copy(engine.decoder.model, torch.float32)
    started_later = [rollout for rollout in found.values() if rollout.weight_version == 1]
    # At least one more is preempted after the change, while another response still uses the old prompt.
    assert {(rollout.serial, rollout.index) for rollout in started_later} > {(1, 0), (1, 1)}
    for rollout in started_later:
        assert rollout.switches == ()
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, prompt(10), [rollout.tokens.tolist()])
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=2e-5)
    assert found[0, 0].weight_version == 0


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.7}, {"top_k": 3}])
def test_replayed_graphs_draw_the_same_tokens(params, monkeypatch):
    """Uses a stand-in for CUDA graphs."""
    questions = [prompt(length, seed=length) for length in (1, 3, 40, PAGE + 5, 2 * PAGE)]
    requests = [Request(i, q, 3, SamplingParams(max_tokens=9 + i, **params)) for i, q in enumerate(questions)]
    expected = drain(paged_engine(tiny_llama(), stop=()), *requests)
    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(step, "_can_capture", lambda model: True)
    model = tiny_llama()
    trunk._TRUNKS[model] = trunk.FusedTrunk.of(model)
    engine = paged_engine(model, stop=(), max_concurrent=7)
    engine.decoder.prefill.can_capture = True
    for _ in range(2):
        found = drain(engine, *requests)
        assert all(np.array_equal(found[key].tokens, expected[key].tokens) for key in expected)
        for key, rollout in expected.items():
            np.testing.assert_allclose(found[key].logprobs, rollout.logprobs, atol=1e-5)
    assert engine.decoder.prefill.captured and engine.decoder.decode_step.graphs
    assert engine.metrics()["engine/graph_replays"] > 0


def reply(key, turn):
    return tuple(range(20, 24 + (3 * key[0] + key[1] + 5 * turn) % 30))


def played(engine, model, requests, turns=3, limit=3 * PAGE):
    found, seen = play(Subject(engine, model), requests, turns, given=reply, limit=limit)
    check_turns(found, seen, reply)
    return found


def test_when_pages_run_out_episodes_give_their_cache_up_or_restart_from_what_is_fixed():
    model = tiny_llama()
    params = SamplingParams(max_tokens=PAGE + 10)
    requests = [Request(i, prompt(10 + PAGE * (i % 2), seed=i), 2, params, turns=True) for i in range(4)]
    roomy = played(paged_engine(model), model, requests)
    engine = paged_engine(model, max_concurrent=4, pages=1 + 8)
    unparked = []
    unpark = engine.decoder.unpark
    engine.decoder.unpark = lambda responses: unparked.append(len([*responses])) or unpark(responses)
    tight = played(engine, model, requests)  # also checks that nothing of an earlier turn changes
    assert engine.metrics()["engine/restarts"] > 0 and len(unparked) > len(requests) * 2
    assert all(np.array_equal(tight[key].tokens, roomy[key].tokens) for key in roomy)
    assert len(engine.decoder.store.free) == 8 and not engine.prompts


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1])
def test_a_next_turn_computes_only_the_new_tokens(length, computed):
    model = tiny_llama()
    engine = paged_engine(model, stop=(), max_concurrent=1)
    request = Request(0, prompt(length), 1, SamplingParams(max_tokens=BURST), turns=True)
    engine.submit([request])
    (first,) = engine.poll()
    given = tuple(range(20, 20 + PAGE))
    computed.clear()
    engine.extend([Extension(request, first, given, len(first) + PAGE + BURST)])
    (second,) = engine.poll()
    # The last token of the first turn, all given ones but the last, and a step for each token that is drawn.
    assert computed == [PAGE, *[1] * BURST]
    twin = plain.plain_copy(model, torch.float32)
    with torch.no_grad():
        (expected,) = plain.logprobs(twin, request.prompt, [second.tokens.tolist()])
    own = second.is_own
    np.testing.assert_allclose(second.logprobs[own], expected.numpy()[own], atol=2e-5)


def test_given_tokens_are_computed_by_replayed_graphs(monkeypatch):
    """Uses a stand-in for CUDA graphs."""
    requests = [Request(i, prompt(5 + 30 * i, seed=i), 3, SamplingParams(max_tokens=60), turns=True) for i in range(3)]
    model = tiny_llama()
    expected = played(paged_engine(model), model, requests)
    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(step, "_can_capture", lambda model: True)
    fused = tiny_llama()
    trunk._TRUNKS[fused] = trunk.FusedTrunk.of(fused)
    engine = paged_engine(fused, max_concurrent=7)
    engine.decoder.extension.can_capture = True
    found = played(engine, fused, requests)
    assert all(np.array_equal(found[key].tokens, expected[key].tokens) for key in expected)
    assert sum(graph.replays for graph, _ in engine.decoder.extension.captured.values()) > 0


def test_a_stop_string_ends_a_turn_only_within_it():
    """The environment's tokens may contain a stop string, or a part of one, which must not end the turn."""
    model = tiny_llama()
    model.set_attn_implementation(ATTENTION_NAME)
    requests = [
        Request(i, prompt(9, seed=i), 4, SamplingParams(max_tokens=20, stop=("ab", "c", "de")), turns=True)
        for i in range(6)
    ]
    text = tiny_tokenizer().encode("cdea")
    engines = paged_engine(model, stop=()), EmbeddedEngine(model, tiny_tokenizer(), frozenset(), 0, 64)
    paged, eager = (
        play(Subject(engine, model), requests, 3, given=lambda key, turn: tuple(text), limit=80)[0]
        for engine in engines
    )
    assert all(np.array_equal(eager[key].tokens, paged[key].tokens) for key in eager)
    assert {rollout.finish_reason for rollout in eager.values()} == {"stop", "length"}
