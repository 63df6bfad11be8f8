"""Responses that begin alike: the equal tokens are computed once, and gradients and log-probabilities are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo.model.attention as attention
from benchmarks.episode_update import PROMPT_TOKENS, guess_groups
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.policy.packing import Batch, micro_batches, reference_batches
from dapo.policy.policy import Policy
from dapo.policy.sharing import divide
from dapo.types import Group, Score
from tests import make, plain
from tests.policy.test_update import MODES, assert_same, config, for_dapo, packed_gradients, with_given
from tests.tiny import tiny_llama

NONE = torch.empty(0)


def episodes(seed: int, count: int = 3, n: int = 4, *, with_reference: bool = False) -> list[Group]:
    """Return groups of episodes, of which many begin as another one does, and some are equal to one or part of it."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(4, 130, rng.integers(1, 7)).tolist()) for _ in range(max(1, count - 1))]
    groups, seen = [], {prompt: [[]] for prompt in prompts}
    for serial in range(count):
        prompt = prompts[rng.integers(len(prompts))]
        rollouts = []
        for index in range(n):
            before = seen[prompt][rng.integers(len(seen[prompt]))]
            begin = before[: rng.integers(len(before) + 1)] if rng.random() < 0.8 else []
            tokens = begin + rng.integers(4, 130, rng.integers(0 if begin else 1, 6)).tolist()
            seen[prompt].append(tokens)
            rollout = make.rollout(tokens, rng.uniform(-6, -3, len(tokens)).tolist(), serial=serial, index=index)
            rollouts.append(with_given(rollout, rng))
        scores = [Score(float(rng.integers(3))) if rng.random() > 0.1 else Score(None, error="no") for _ in range(n)]
        reference = [rng.uniform(-6, -3, len(r)).astype(np.float32) for r in rollouts] if with_reference else None
        rules = GroupRules(99, filter_enabled=False)
        groups.append(form_group(serial, make.prompt(prompt), rollouts, scores, rules, reference))
    return [group for group in groups if group.kept]


def computed(batches: Sequence[Batch]) -> int:
    return sum(len(batch.tokens_T) for batch in batches if batch.rollouts)


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 120),
    loss=st.sampled_from([*MODES, "gspo"]),
    tree_tokens=st.sampled_from([0, 15, 512]),
    kl=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60)
def test_the_gradient_of_episodes_that_begin_alike_is_that_of_the_definition_for_every_split(
    seed, budget, loss, tree_tokens, kl
):
    groups = episodes(seed, with_reference=kl > 0)
    if not groups:
        return
    model = for_dapo(plain.in_float64(tiny_llama()))
    options = {"algorithm__loss_agg_mode": loss}
    if loss == "gspo":
        options = {"algorithm__loss": "gspo", "algorithm__clip_ratio_low": 0.3, "algorithm__clip_ratio_high": 0.5}
    cfg = config(optim__max_tokens_per_micro_batch=budget, algorithm__kl_loss_coef=kl, **options)
    before, attention.TREE_TOKENS = attention.TREE_TOKENS, tree_tokens
    try:
        value, grads = packed_gradients(model, groups, cfg)
    finally:
        attention.TREE_TOKENS = before
    twin = plain.plain_copy(model)
    clips = {"loss": "gspo", "low": 0.3, "high": 0.5, "c": math.inf} if loss == "gspo" else {}
    expected = plain.mini_batch_loss(twin, groups, cfg.algorithm.loss_agg_mode, kl=kl, **clips)
    assert value == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
    assert_same(grads, plain.gradients(twin, expected), atol=1e-6, rtol=1e-6)


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 120), ranks=st.integers(1, 4))
@settings(max_examples=25)
def test_the_gradients_of_all_ranks_add_up_to_those_without_sharing(seed, budget, ranks):
    groups = episodes(seed)
    if not groups:
        return
    model = for_dapo(plain.in_float64(tiny_llama()))
    _, expected = packed_gradients(model, groups, config(), share_prompts=False)
    policy = Policy(model, config(optim__max_tokens_per_micro_batch=budget))
    policy.ranks = ranks
    for rank in range(ranks):
        policy.rank = rank
        for batch in policy._micro_batches(groups, version=0):
            policy._backward(batch)
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, atol=1e-9, rtol=1e-9)


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 120), ranks=st.integers(1, 3))
@settings(max_examples=25)
def test_log_probabilities_and_all_other_values_of_a_token_are_those_without_sharing(seed, budget, ranks):
    groups = episodes(seed, with_reference=True)
    if not groups:
        return
    groups = [replace(g, start_logprobs=tuple(r.logprobs - 1 for r in g.rollouts)) for g in groups]
    policy = Policy(for_dapo(plain.in_float64(tiny_llama())), config())

    def values(batches: list[Batch]) -> dict[tuple[int, int], list[torch.Tensor]]:
        found = {}
        for batch in batches:
            with torch.no_grad():
                logprobs = policy._logprobs(policy.causal_lm, batch)
            columns = (
                logprobs, batch.targets_R, batch.advantages_R, batch.old_logprobs_R, batch.ref_logprobs_R,
                batch.start_logprobs_R, batch.weights_R, batch.is_current_R,
            )  # fmt: skip
            for number, rollout in enumerate(batch.rollouts, start=1):
                own = batch.responses_R == number
                assert batch.targets_R[own].tolist() == rollout.tokens[rollout.is_own].tolist()
                found[rollout.serial, rollout.index] = [column[own] for column in columns]
        return found

    def packed(share: bool) -> list[Batch]:
        options = {"share_prompts": share, "ranks": ranks}
        return [
            b for r in range(ranks) for b in micro_batches(groups, MODES[0], budget, 0, policy.like, rank=r, **options)
        ]

    shared, alone = values(packed(True)), values(packed(False))
    assert shared.keys() == alone.keys()
    for key, columns in alone.items():
        for column, expected in zip(shared[key], columns, strict=True):
            torch.testing.assert_close(column, expected, atol=1e-12, rtol=1e-9)
    references = values(reference_batches(groups, budget, policy.like))
    for key, columns in alone.items():
        torch.testing.assert_close(references[key][0], columns[0], atol=1e-12, rtol=1e-9)


def partitions(members: list[int]) -> Iterator[list[list[int]]]:
    if not members:
        yield []
        return
    for rest in partitions(members[1:]):
        yield [members[:1], *rest]
        for place, part in enumerate(rest):
            yield [*rest[:place], [members[0], *part], *rest[place + 1 :]]


def in_common(sequences: Sequence[Sequence[int]]) -> int:
    return next(
        (i for i, column in enumerate(zip(*sequences, strict=False)) if len(set(column)) > 1), min(map(len, sequences))
    )


@given(prompt=st.integers(1, 6), responses=st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=1, max_size=6))
@settings(max_examples=300)
def test_no_division_of_the_responses_computes_fewer_tokens(prompt, responses):
    def tokens(part: list[int], shared: int) -> int:
        return prompt + shared + sum(len(responses[i]) - shared for i in part)

    found = divide(prompt, [np.array(each, np.int32) for each in responses])
    assert sorted(i for _, part in found for i in part) == list(range(len(responses)))
    assert all(shared <= in_common([responses[i] for i in part]) for shared, part in found)
    fewest = min(
        sum(tokens(part, in_common([responses[i] for i in part])) for part in division)
        for division in partitions(list(range(len(responses))))
    )
    assert sum(tokens(part, shared) for shared, part in found) == fewest


def tokens_with_shared_prompts(groups: list[Group], budget: int) -> int:
    """Count the tokens of micro-batches whose responses share their prompts only."""
    pairs = [(group.prompt.tokens, group.rollouts[i]) for group in groups for i in np.flatnonzero(group.trains)]
    order = list(dict.fromkeys(prompt for prompt, _ in pairs))
    total, used, last = 0, 0, None
    for prompt, rollout in sorted(pairs, key=lambda pair: order.index(pair[0])):
        cost = len(rollout) - 1 + (len(prompt) if prompt != last else 0)
        if used and used + cost > budget:
            used, cost = 0, len(rollout) - 1 + len(prompt)
        total, used, last = total + cost, used + cost, prompt
    return total


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 200), n=st.integers(1, 8))
@settings(max_examples=200)
def test_sharing_never_computes_more_tokens_and_keeps_to_the_budget(seed, budget, n):
    groups = episodes(seed, n=n)
    if not groups:
        return
    batches = micro_batches(groups, MODES[0], budget, 0, NONE)
    assert computed(batches) <= tokens_with_shared_prompts(groups, budget)
    assert all(len(batch.tokens_T) <= budget or len(batch.rollouts) == 1 for batch in batches)


def test_a_long_chain_of_responses_is_divided_without_recursion():
    """Each of 3,000 responses continues the one before it."""
    found = divide(5, [np.full(length, 7, np.int32) for length in range(1, 3001)])
    assert sum(len(part) for _, part in found) == 3000
    assert sum(5 + shared + sum(i + 1 - shared for i in part) for shared, part in found) < 3000 * 3001 / 2 / 10


def test_equal_episodes_are_computed_once_and_each_is_trained_on():
    rollouts = [make.rollout([7, 8, 9, 10], index=i) for i in range(3)]
    group = form_group(0, make.prompt((1, 2)), rollouts, [Score(1.0), Score(0.0), Score(2.0)], GroupRules(9))
    (batch,) = micro_batches([group], MODES[0], 99, 0, NONE)
    assert batch.tokens_T.tolist() == [1, 2, 7, 8, 9]
    assert batch.predictors_R.tolist() == [1, 2, 3, 4] * 3
    assert batch.targets_R.tolist() == [7, 8, 9, 10] * 3
    assert len(set(batch.advantages_R.tolist())) == 3
    assert len(micro_batches([group], MODES[0], 99, 0, NONE, share_prompts=False)[0].tokens_T) == 15


def test_an_episode_that_is_the_beginning_of_another_ends_inside_it():
    rollouts = [make.rollout(tokens, index=i) for i, tokens in enumerate([[7, 8, 9, 10, 11], [7, 8, 9]])]
    group = form_group(0, make.prompt((1, 2)), rollouts, [Score(1.0), Score(0.0)], GroupRules(9))
    (batch,) = micro_batches([group], MODES[0], 99, 0, NONE)
    assert batch.tokens_T.tolist() == [1, 2, 7, 8, 9, 10]
    assert batch.predictors_R.tolist() == [1, 2, 3, 4, 5, 1, 2, 3]


def test_groups_that_share_most_tokens_are_cut_before_their_states_take_the_memory():
    rollouts = [make.rollout([7] * 999 + [i], index=i) for i in range(30)]
    group = form_group(0, make.prompt(), rollouts, [Score(float(i)) for i in range(30)], GroupRules(9999))
    batches = micro_batches([group], MODES[0], 2000, 0, NONE)
    assert [len(batch.targets_R) for batch in batches] == [8000, 8000, 8000, 6000]


def test_episodes_of_a_guessing_game_compute_a_quarter_to_two_thirds_fewer_tokens():
    """All rows of the game have one prompt, and most episodes begin with the same guesses."""
    saved = {}
    for count, n in ((2, 8), (4, 8), (64, 16)):
        groups = guess_groups(0, count, n)
        inputs = sum(len(rollout) - 1 for group in groups for rollout in group.rollouts)
        assert tokens_with_shared_prompts(groups, 10**9) == PROMPT_TOKENS + inputs
        tokens = computed(micro_batches(groups, MODES[0], 10**9, 0, NONE))
        saved[count] = 1 - tokens / (PROMPT_TOKENS + inputs)
    assert saved == {
        2: pytest.approx(0.26, abs=0.01),
        4: pytest.approx(0.25, abs=0.01),
        64: pytest.approx(0.64, abs=0.01),
    }


def test_the_attention_of_shared_turns_is_counted_as_it_is_computed():
    groups = episodes(3)
    result = Policy(for_dapo(tiny_llama()), config(algorithm__max_logprob_gap=99)).update(groups, 1, 0)
    (batch,) = micro_batches(groups, MODES[0], 4096, 0, NONE)
    positions = batch.positions_T.tolist()
    assert result.computed == len(positions)
    assert result.pairs == sum(position + 1 for position in positions)
