"""The memory budget of an update, and what happens when memory runs out anyway."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.config import OptimConfig
from dapo.errors import ModelError
from dapo.model.memory import ENOUGH_TOKENS, GIB, HEAD_BYTES, LEAST_HEAD_BYTES, MAX_TOKENS
from dapo.model.meter import inner_width
from dapo.model.trunk import FusedTrunk, PlainTrunk
from dapo.policy import budget
from dapo.policy.budget import Budget, _activation_bytes
from dapo.policy.policy import Policy
from dapo.types import Score
from tests import make
from tests.policy.test_update import config, for_dapo, random_groups
from tests.tiny import tiny_llama


class OnGpu:
    """A tiny model that pretends to be on a GPU with `free` bytes. It is never run."""

    def __init__(self, monkeypatch, free: int) -> None:
        self.model = tiny_llama().to(torch.bfloat16)
        self.trunk = FusedTrunk.of(self.model)
        weight = self.model.lm_head.weight
        monkeypatch.setattr(budget, "free_memory", lambda device: free)
        monkeypatch.setattr(budget, "head_weight", lambda model: _Cuda(weight))

    def budget(self, pending_bytes=0, cache_bytes=0, **options) -> Budget:
        return Budget.of(self.model, self.trunk, OptimConfig(**options), pending_bytes, cache_bytes)


class _Cuda:
    def __init__(self, weight) -> None:
        self.device, self.dtype = torch.device("cuda"), weight.dtype


def test_on_a_cpu_the_budget_is_the_option_or_a_default():
    model = tiny_llama()
    assert Budget.of(model, PlainTrunk(model), OptimConfig(), 0) == Budget(4096)
    assert Budget.of(model, PlainTrunk(model), OptimConfig(max_tokens_per_micro_batch=77), 0) == Budget(77)


def test_on_a_gpu_the_budget_follows_the_free_memory_and_what_the_update_will_allocate(monkeypatch):
    gpu = OnGpu(monkeypatch, free=100 * GIB)
    assert gpu.budget() == Budget(MAX_TOKENS)
    per_token = _activation_bytes(gpu.model, gpu.trunk, recompute=False)
    wanted = 40_000
    spare = (wanted + 0.5) * per_token
    gpu = OnGpu(monkeypatch, free=int(spare + LEAST_HEAD_BYTES + 3 * GIB))
    found = gpu.budget(pending_bytes=3 * GIB)
    assert abs(found.max_tokens - wanted) <= 1 and not found.recompute


def test_the_budget_shrinks_if_an_update_took_more_memory_than_estimated():
    estimate = Budget(60_000, room=60 * GIB)
    fixed = HEAD_BYTES
    for used in (fixed // 2, fixed + 15_000 * GIB // 1000):  # less than a chunk of logits, and exactly the estimate
        assert estimate.tokens_that_fit(15_000, used) == 60_000
    assert estimate.tokens_that_fit(15_000, fixed + 2 * 15_000 * GIB // 1000) == 30_000
    assert Budget(1, room=0.0).tokens_that_fit(100, fixed + GIB) == 1


def test_if_too_few_tokens_fit_activations_are_recomputed_unless_forbidden(monkeypatch):
    probe = OnGpu(monkeypatch, free=0)
    per_token = _activation_bytes(probe.model, probe.trunk, recompute=False)
    assert _activation_bytes(probe.model, probe.trunk, recompute=True) < per_token
    gpu = OnGpu(monkeypatch, free=int(LEAST_HEAD_BYTES + 5000 * per_token))
    assert gpu.budget().recompute
    assert gpu.budget().max_tokens > 5000
    never = gpu.budget(recompute_activations="never")
    assert not never.recompute and abs(never.max_tokens - 5000) <= 1
    small = {"head_bytes": LEAST_HEAD_BYTES}
    assert gpu.budget(max_tokens_per_micro_batch=6000) == Budget(6000, recompute=True, **small)
    assert gpu.budget(max_tokens_per_micro_batch=4000) == Budget(4000, **small)
    assert OnGpu(monkeypatch, free=100 * GIB).budget(recompute_activations="always").recompute


def test_if_hardly_anything_fits_the_update_takes_the_memory_of_the_cache(monkeypatch):
    gpu = OnGpu(monkeypatch, free=LEAST_HEAD_BYTES)
    assert gpu.budget().max_tokens == 1
    found = gpu.budget(cache_bytes=GIB)
    assert found.needs_engine_memory and found.max_tokens > ENOUGH_TOKENS
    assert not OnGpu(monkeypatch, free=100 * GIB).budget(cache_bytes=GIB).needs_engine_memory


def test_an_update_that_runs_out_of_memory_is_done_in_halves_with_the_same_result(monkeypatch):
    groups = random_groups(3, 5, 4)
    # The limit is far above the size of the batch, so halving the limit alone would change nothing.
    plain, short = (Policy(for_dapo(tiny_llama()), config(optim__max_tokens_per_micro_batch=9999)) for _ in range(2))
    expected = plain.update(groups, step=1, version=0)
    backward, sizes = short._backward, []

    def small_memory(batch):
        if len(batch.tokens_T) > 40:
            raise torch.cuda.OutOfMemoryError("out of memory")
        sizes.append(len(batch.tokens_T))
        return backward(batch)

    monkeypatch.setattr(short, "_backward", small_memory)
    found = short.update(groups, step=1, version=0)
    assert max(sizes) <= 40 and short.budget.max_tokens < 40
    assert all(note.startswith("an update ran out of memory with ") for note in found.notes) and found.notes
    for name in ("loss", "grad_norm", "entropy"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5)
    for first, second in zip(plain.model.parameters(), short.model.parameters(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_a_single_response_that_does_not_fit_is_an_error_in_one_sentence(monkeypatch):
    policy = Policy(for_dapo(tiny_llama()), config())

    def no_memory(batch):
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(policy, "_backward", no_memory)
    with pytest.raises(ModelError, match=r"a single response of \d+ tokens with its prompt does not fit"):
        policy.update(random_groups(3, 2, 4), step=1, version=0)


def test_a_response_that_does_not_fit_is_an_error_although_others_do(monkeypatch):
    policy = Policy(for_dapo(tiny_llama()), config())
    rollouts = [make.rollout([5] * length, [-4.0] * length, index=i) for i, length in enumerate([60, *range(3, 11)])]
    scores = [Score(float(i % 2)) for i in range(len(rollouts))]
    group = form_group(0, make.prompt((4, 6, 7)), rollouts, scores, GroupRules(60))
    backward, attempts = policy._backward, []

    def small_memory(batch):
        if len(batch.tokens_T) > 50:
            attempts.append(policy.budget.max_tokens)
            assert len(attempts) < 30, "it never gives up"
            raise torch.cuda.OutOfMemoryError("out of memory")
        return backward(batch)

    monkeypatch.setattr(policy, "_backward", small_memory)
    with pytest.raises(ModelError, match=r"a single response of 62 tokens with its prompt does not fit"):
        policy.update([group], step=1, version=0)
    assert attempts == sorted(attempts, reverse=True)


def test_models_with_another_name_for_their_inner_width_have_a_budget(monkeypatch):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40))
    assert _activation_bytes(gpt2, PlainTrunk(gpt2), recompute=False) > 0
    assert inner_width(gpt2.config) == 64


def test_a_cache_that_is_lent_counts_as_memory_of_the_update(monkeypatch):
    gpu = OnGpu(monkeypatch, free=5 * GIB)
    kept = gpu.budget(cache_bytes=GIB // 8, max_tokens_per_micro_batch=7)
    lent = Budget.of(gpu.model, gpu.trunk, OptimConfig(max_tokens_per_micro_batch=7), 0, GIB // 8, lends=True)
    alone = Budget.of(gpu.model, gpu.trunk, OptimConfig(), 0, lends=True)
    assert (kept.needs_engine_memory, lent.needs_engine_memory, alone.needs_engine_memory) == (False, True, False)


def test_graphs_of_small_micro_batches_take_at_most_a_quarter_of_the_memory(monkeypatch):
    gpu = OnGpu(monkeypatch, free=100 * GIB)
    kept = _activation_bytes(gpu.model, gpu.trunk, recompute=False)

    def found(free: int, tokens: int = 16384) -> Budget:
        monkeypatch.setattr(budget, "free_memory", lambda device: free)
        return Budget.of(gpu.model, gpu.trunk, OptimConfig(), 0, graph_tokens=tokens)

    assert found(100 * GIB).graph_tokens == 16384
    room = 2 * LEAST_HEAD_BYTES + 40_000 * kept
    tight = found(room)
    assert 0 <= tight.graph_tokens * kept <= room / 4 and not tight.recompute
    assert found(LEAST_HEAD_BYTES + 17_000 * kept).graph_tokens == 0  # beside graphs, activations would be recomputed
