"""The embedded engine with each of its decoders, against plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo.engine.embedded.eager import EagerDecoder
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.embedded.paged import BURST, PagedDecoder
from dapo.kernels import native
from dapo.model.attention import ATTENTION_NAME, Family
from dapo.model.forward import head_weight, hidden_states, packed_plan
from dapo.model.trunk import _TRUNKS, FusedTrunk, can_fuse
from dapo.policy.head import chunked_logprobs
from dapo.types import Extension, Request, SamplingParams
from tests import plain
from tests.engine.test_contract import drain
from tests.kernels.ways import native_types, needs_native_for
from tests.tiny import (
    EOS_ID,
    PAD_ID,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_smollm3,
    tiny_tokenizer,
)


@pytest.fixture(params=["eager", "paged", "paged and fused"])
def engine_for(request):
    """Return a builder of engines with the decoder for CPUs, and with the one for GPUs over its PyTorch kernels."""

    def build(model, *, stop=(EOS_ID,), seed=0, max_concurrent=64, pages=400):
        model.set_attn_implementation(ATTENTION_NAME)
        engine = EmbeddedEngine(model, tiny_tokenizer(), frozenset(stop), seed, max_concurrent)
        if "fused" in request.param and model not in _TRUNKS:
            if not can_fuse(model):
                pytest.skip("this architecture has no fused trunk")
            _TRUNKS[model] = FusedTrunk.of(model)
        if "paged" in request.param:
            engine.decoder = PagedDecoder(model, frozenset(stop), max_concurrent, max_length=128, pages=pages)
        return engine

    return build


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(4, 130, rng.integers(1, longest)).tolist()) for _ in range(count)]


@pytest.mark.parametrize(
    ("build", "max_concurrent"),
    [
        *((build, count) for build in (tiny_llama, tiny_qwen2) for count in (1, 3, 64)),
        *((build, 7) for build in (tiny_qwen3, tiny_mistral, tiny_smollm3, tiny_gemma3)),
    ],
)
def test_greedy_tokens_are_those_of_transformers_generate_for_mixed_lengths_and_groups(
    engine_for, build, max_concurrent
):
    model = build()
    reference = plain.plain_copy(model, torch.float32)
    stop = [EOS_ID, *range(4, 24)]  # many stop tokens, so that responses end at different times
    questions = prompts(6)
    params = SamplingParams(temperature=0, max_tokens=20)
    requests = [Request(i, prompt, 1 + i % 3, params) for i, prompt in enumerate(questions)]
    found = drain(engine_for(model, stop=stop, max_concurrent=max_concurrent), *requests)
    lengths = set()
    for i, prompt in enumerate(questions):
        tokens = torch.tensor([prompt])
        out = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=stop,
            pad_token_id=PAD_ID,
        )
        expected = out[0, len(prompt) :].tolist()
        lengths.add(len(expected))
        for index in range(requests[i].n):
            assert found[i, index].tokens.tolist() == expected
            assert found[i, index].finish_reason == ("stop" if expected[-1] in stop else "length")
    assert len(found) == sum(request.n for request in requests)
    assert len(lengths) > 1  # otherwise nothing entered and left at different times


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_recorded_log_probabilities_are_those_of_plain_transformers(engine_for, build, temperature):
    model = build()
    twin = plain.plain_copy(model, torch.float32)
    questions = prompts(5, seed=1)
    params = SamplingParams(temperature, max_tokens=12)
    found = drain(engine_for(model, max_concurrent=7), *(Request(i, p, 4, params) for i, p in enumerate(questions)))
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, questions[serial], [rollout.tokens.tolist()], temperature)
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("build", "size", "dtype", "way"),
    [
        *((build, 32, torch.bfloat16, "torch") for build in (tiny_llama, tiny_qwen2, tiny_qwen3)),
        *(
            pytest.param(build, size, dtype, "native", marks=needs_native_for(dtype))
            for dtype in native.INSTRUCTIONS
            for build, size in zip(
                (tiny_llama, tiny_qwen2, tiny_qwen3, tiny_mistral, tiny_smollm3), (32, 64, 128, 80, 112), strict=True
            )
        ),
    ],
)
def test_on_a_cpu_sampler_and_trainer_agree_and_sampling_is_repeatable(build, size, dtype, way, monkeypatch):
    if way == "torch":
        monkeypatch.setattr(native, "library", lambda dtype: None)
    model = build(hidden_size=128, head_dim=size).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    questions = prompts(4, seed=1)
    requests = [Request(i, p, 8, SamplingParams(max_tokens=12)) for i, p in enumerate(questions)]
    first, again = (
        drain(EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), 0, max_concurrent=32), *requests)
        for _ in range(2)
    )
    gaps = []
    for (serial, index), rollout in first.items():
        assert np.array_equal(rollout.tokens, again[serial, index].tokens)
        assert np.array_equal(rollout.logprobs, again[serial, index].logprobs)
        prompt = questions[serial]
        tokens, positions = torch.tensor([*prompt, *rollout.tokens]), torch.arange(len(prompt) + len(rollout))
        plan = packed_plan(model, [Family((0, len(prompt)), ((len(prompt), len(rollout)),))], positions)
        with torch.no_grad():
            hidden = hidden_states(model, tokens, positions, plan)[len(prompt) - 1 : -1]
            expected = chunked_logprobs(hidden, head_weight(model), tokens[len(prompt) :], 1.0)
        gaps.append(np.abs(rollout.logprobs - expected.numpy()))
    if way == "native":
        assert np.concatenate(gaps).max() < 1e-5, "both compute the same bits but for the sum over the vocabulary"
    else:
        assert np.concatenate(gaps).mean() < 0.02


def llama_for_kernels(dtype):
    model = tiny_llama(hidden_size=128, head_dim=32).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@native_types
def test_on_a_cpu_with_kernels_a_response_has_the_same_bits_alone_and_in_any_batch(dtype):
    model, questions = llama_for_kernels(dtype), prompts(6, seed=2)
    requests = [Request(i, p, 5, SamplingParams(max_tokens=20)) for i, p in enumerate(questions)]

    def sampled(*some, slots):
        return drain(EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), 0, max_concurrent=slots), *some)

    together, few, alone = sampled(*requests, slots=32), sampled(*requests, slots=3), sampled(requests[4], slots=32)
    assert all(np.array_equal(few[key].logprobs, together[key].logprobs) for key in together)
    assert all(np.array_equal(alone[key].logprobs, together[key].logprobs) for key in alone)


@native_types
def test_on_a_cpu_with_kernels_given_tokens_have_the_bits_of_training(dtype):
    model, questions = llama_for_kernels(dtype), prompts(3, seed=5)
    requests = [Request(i, p, 4, SamplingParams(max_tokens=6), turns=True) for i, p in enumerate(questions)]
    engine = EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), 0, max_concurrent=7)
    first = drain(engine, *requests)
    engine.extend([Extension(requests[s], r, (20, 21, 22, 23, 24)[: s + 2], 20) for (s, _), r in first.items()])
    for (serial, _), rollout in drain(engine).items():
        prompt, tokens = questions[serial], torch.tensor(rollout.tokens).long()
        whole = torch.cat([torch.tensor(prompt), tokens])
        families = [Family((0, len(prompt)), ((len(prompt), len(tokens)),))]
        with torch.no_grad():
            positions = torch.arange(len(whole))
            hidden = hidden_states(model, whole, positions, packed_plan(model, families, positions))
            expected = chunked_logprobs(hidden[len(prompt) - 1 : -1], head_weight(model), tokens, 1.0).numpy()
        drawn = np.ones(len(tokens), bool)
        for start, end in rollout.given:
            drawn[start:end] = False
        assert not drawn.all() and np.abs(rollout.logprobs - expected)[drawn].max() < 1e-5


def test_a_rollout_does_not_depend_on_what_else_is_in_flight(engine_for):
    model = tiny_llama()
    questions = prompts(6, seed=2)
    params = SamplingParams(max_tokens=10)
    together = drain(engine_for(model, max_concurrent=5), *(Request(i, p, 3, params) for i, p in enumerate(questions)))
    alone = drain(engine_for(model), Request(4, questions[4], 3, params))
    for index in range(3):
        assert alone[4, index].tokens.tolist() == together[4, index].tokens.tolist()


def test_groups_of_the_same_prompt_and_phases_draw_different_tokens(engine_for):
    model = tiny_llama()
    (prompt,) = prompts(1)
    params = SamplingParams(max_tokens=10)
    train = drain(engine_for(model), Request(0, prompt, 2, params), Request(1, prompt, 2, params))
    evaluated = drain(engine_for(model), Request(0, prompt, 2, params, "eval"))
    texts = [tuple(r.tokens.tolist()) for r in [*train.values(), *evaluated.values()]]
    assert len(set(texts)) == 6


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(engine_for):
    model = tiny_llama()
    request = Request(0, prompts(1)[0], 4, SamplingParams(max_tokens=10))
    first, again, other = (drain(engine_for(model, seed=seed), request) for seed in (3, 3, 4))
    assert all(np.array_equal(first[key].tokens, again[key].tokens) for key in first)
    assert all(np.array_equal(first[key].logprobs, again[key].logprobs) for key in first)
    assert any(not np.array_equal(first[key].tokens, other[key].tokens) for key in first)


def tokens_per_pass(model, monkeypatch):
    """Return a list that gets the number of tokens of each forward pass."""
    seen, embed = [], model.model.embed_tokens.forward
    monkeypatch.setattr(model.model.embed_tokens, "forward", lambda ids: seen.append(ids.numel()) or embed(ids))
    return seen


def test_the_prompt_of_a_group_is_computed_once(engine_for, monkeypatch):
    model = tiny_llama()
    seen = tokens_per_pass(model, monkeypatch)
    if not isinstance(engine_for(model).decoder, EagerDecoder):
        pytest.skip("counts the tokens of the decoder for CPUs; test_paged.py has its own")
    first, second = (4, 5, 6, 7, 8, 9), (10, 11, 12, 13)
    params = SamplingParams(max_tokens=3)
    drain(
        engine_for(model, stop=()),
        Request(0, first, 5, params),
        Request(1, second, 5, params),
        Request(2, first, 5, params),
    )
    # 10 distinct prompt tokens; then each of 15 responses takes all but its last token as input.
    assert sum(seen) == len(first) + len(second) + 15 * 2


def test_a_next_turn_computes_only_the_new_tokens(engine_for, monkeypatch):
    model = tiny_llama()
    seen = tokens_per_pass(model, monkeypatch)
    engine = engine_for(model, stop=())
    if not isinstance(engine.decoder, EagerDecoder):
        pytest.skip("counts the tokens of the decoder for CPUs; test_paged.py has its own")
    request = Request(0, (4, 5, 6, 7, 8, 9), 2, SamplingParams(max_tokens=3), turns=True)
    first = drain(engine, request)
    seen.clear()
    engine.extend([Extension(request, rollout, (20, 21, 22, 23), 10) for rollout in first.values()])
    second = drain(engine)
    # For both: the last token of the first turn with the given ones, in the step that draws the first token.
    assert seen == [2 * 5, 2, 2]
    assert all(len(rollout) == 10 and rollout.sampled == 6 for rollout in second.values())


def test_an_episode_that_goes_on_is_unaffected_if_another_is_canceled_before_its_given_tokens_are_computed(engine_for):
    model = tiny_llama()
    requests = [Request(i, p, 1, SamplingParams(max_tokens=4), turns=True) for i, p in enumerate(prompts(3, seed=7))]

    def goes_on(*, is_disturbed):
        engine = engine_for(model, stop=())
        first = drain(engine, *requests)
        engine.extend([Extension(r, first[r.serial, 0], (20, 21, 22), 30) for r in requests])
        if is_disturbed:
            # Its only token is drawn when it starts, so a decoder without bursts returns before it takes a step.
            engine.submit([Request(9, (4, 5), 1, SamplingParams(max_tokens=1))])
            assert [rollout.serial for rollout in engine.poll()] == [9]
            assert not isinstance(engine.decoder, EagerDecoder) or len(engine.decoder.given) == 3
            engine.cancel([0])
        return drain(engine)

    expected, found = goes_on(is_disturbed=False), goes_on(is_disturbed=True)
    assert found.keys() == expected.keys() - {(0, 0)}
    assert all(found[key].tokens.tolist() == expected[key].tokens.tolist() for key in found)
    twin = plain.plain_copy(model, torch.float32)
    for (serial, _), rollout in found.items():
        with torch.no_grad():
            (logprobs,) = plain.logprobs(twin, requests[serial].prompt, [rollout.tokens.tolist()], 1.0)
        own = rollout.is_own
        np.testing.assert_allclose(rollout.logprobs[own], logprobs.numpy()[own], atol=1e-5)


def test_a_weight_update_is_visible_in_the_next_sample(engine_for):
    model = tiny_llama()
    engine = engine_for(model)
    request = Request(0, prompts(1)[0], 2, SamplingParams(temperature=0, max_tokens=8))
    before = drain(engine, request)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight))
    engine.sync_weights(7)
    after = drain(engine, request)
    assert not np.array_equal(before[0, 0].tokens, after[0, 0].tokens)
    assert (before[0, 0].weight_version, after[0, 0].weight_version) == (0, 7)
    fresh = drain(engine_for(model), request)
    assert np.array_equal(after[0, 0].tokens, fresh[0, 0].tokens)


def test_a_canceled_group_leaves_and_the_others_are_unaffected(engine_for):
    model = tiny_llama()
    questions = prompts(3, seed=5)
    params = SamplingParams(max_tokens=30)
    requests = [Request(i, p, 2, params) for i, p in enumerate(questions)]
    engine = engine_for(model, stop=(), max_concurrent=4)
    engine.submit(requests)
    with torch.no_grad():
        engine._start_waiting()
        engine.decoder.advance()
    drawn = [engine.decoder.tokens_drawn(response) for response in engine.active]
    assert len(set(drawn)) == 1 and drawn[0] in (2, BURST)
    assert engine.cancel([0]) == 2 * drawn[0]
    assert engine.cancel([99]) == 0
    found = {(r.serial, r.index): r for r in poll_all(engine)}
    assert set(found) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    expected = drain(engine_for(model, stop=(), max_concurrent=4), *requests)
    assert all(np.array_equal(found[key].tokens, expected[key].tokens) for key in found)
    assert not engine.prompts


def poll_all(engine):
    while finished := engine.poll():
        yield from finished


def test_a_stop_token_counts_as_stop_when_it_is_the_first_and_when_it_is_at_the_limit(engine_for):
    model = tiny_llama()
    everything = tuple(range(132))
    found = drain(engine_for(model, stop=everything), Request(0, (5, 6), 3, SamplingParams(max_tokens=4)))
    assert all(len(r) == 1 and r.finish_reason == "stop" for r in found.values())
    found = drain(engine_for(model, stop=everything), Request(0, (5, 6), 3, SamplingParams(max_tokens=1)))
    assert all(len(r) == 1 and r.finish_reason == "stop" for r in found.values())
    found = drain(engine_for(model, stop=()), Request(0, (5, 6), 3, SamplingParams(max_tokens=1)))
    assert all(len(r) == 1 and r.finish_reason == "length" for r in found.values())


def test_the_text_is_the_tokens_without_special_ones(engine_for):
    model = tiny_llama()
    found = drain(engine_for(model), Request(0, (5, 6), 8, SamplingParams(max_tokens=6)))
    tokenizer = tiny_tokenizer()
    for rollout in found.values():
        plain_ids = [token for token in rollout.tokens.tolist() if token > 3]
        assert rollout.text == tokenizer.decode(plain_ids)


def test_the_cache_for_cpus_holds_the_tokens_of_the_responses_that_still_run():
    """Without this, one long response makes the cache as large as if all responses were so long."""
    model = tiny_llama()
    model.set_attn_implementation(ATTENTION_NAME)
    engine = EmbeddedEngine(model, tiny_tokenizer(), frozenset(), seed=0)
    (prompt,) = prompts(1)
    engine.submit([Request(0, prompt, 15, SamplingParams(max_tokens=10))])
    engine.submit([Request(1, prompt, 1, SamplingParams(max_tokens=400))])
    most = 0
    while engine.poll(wait=False) or engine.active:
        _, _, slots, _, capacity, _ = engine.decoder.cache.storage.shape
        most = max(most, slots * capacity)
    assert most <= 2 * 400
