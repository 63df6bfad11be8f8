"""The packed update, compared with plain padded transformers in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo.model.attention as attention
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.config import Config
from dapo.policy import head
from dapo.policy.head import gather_predictors
from dapo.policy.policy import Policy
from dapo.policy.rules import UpdateRules
from dapo.types import Group, Rollout, Score
from tests import make, plain
from tests.tiny import tiny_llama, tiny_qwen2

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def config(**overrides):
    values = {"model": {"path": "tiny"}, "data": {"train": "none", "train_batch_size": 64}}
    for key, value in overrides.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return Config.parse(values)


def for_dapo(model):
    model.set_attn_implementation(attention.ATTENTION_NAME)
    return model


def random_groups(
    seed: int, count: int, n: int, *, overlong_filter: bool = False, with_reference: bool = False, turns: bool = False
) -> list[Group]:
    """Return groups of mixed lengths, some with equal prompts, with random old log-probabilities.

    With `turns`, parts of the responses were given by an environment.
    """
    rng, spans = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    prompts = [tuple(rng.integers(4, 130, rng.integers(1, 12)).tolist()) for _ in range(max(1, count - 1))]
    groups = []
    for serial in range(count):
        tokens = prompts[rng.integers(len(prompts))]
        rollouts = []
        for index in range(n):
            length = int(rng.integers(1, 9))
            finish = "length" if rng.random() < 0.3 else "stop"
            response = rng.integers(4, 130, length).tolist()
            old = rng.uniform(-6, -3, length).tolist()
            rollout = make.rollout(response, old, serial=serial, index=index, finish=finish)
            rollouts.append(with_given(rollout, spans) if turns else rollout)
        scores = [Score(float(rng.integers(3))) if rng.random() > 0.1 else Score(None, error="no") for _ in range(n)]
        reference = [rng.uniform(-6, -3, len(r)).astype(np.float32) for r in rollouts] if with_reference else None
        rules = GroupRules(9, overlong_filter=overlong_filter, filter_enabled=False)
        groups.append(form_group(serial, make.prompt(tokens), rollouts, scores, rules, reference))
    return [group for group in groups if group.kept]


def with_given(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    """Mark up to two spans as given. The first and the last token are the model's."""
    bounds = np.sort(rng.choice(np.arange(1, max(2, len(rollout))), 4)).tolist()
    given = tuple((start, end) for start, end in (bounds[:2], bounds[2:]) if start < end < len(rollout))
    logprobs = rollout.logprobs.copy()
    for start, end in given:
        logprobs[start:end] = 0
    return replace(rollout, given=given, logprobs=logprobs)


def packed_gradients(model, groups, cfg, *, share_prompts=True):
    policy = Policy(model, cfg, share_prompts=share_prompts)
    policy.optimizer.zero_grad()
    loss = sum(float(policy._backward(batch).loss) for batch in policy._micro_batches(groups, version=0))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    policy.optimizer.zero_grad()
    return loss, grads


def assert_same(found, expected, **tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("tree_tokens", [0, 512])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_shared_prompts_give_the_log_probabilities_and_gradients_of_padded_transformers_in_fp32(
    build, tree_tokens, monkeypatch
):
    monkeypatch.setattr(attention, "TREE_TOKENS", tree_tokens)
    model = for_dapo(build())
    groups = random_groups(1, 5, 4)
    twin = plain.plain_copy(model, torch.float32)
    policy = Policy(model, config(optim__max_tokens_per_micro_batch=60))
    results = {}
    for batch in policy._micro_batches(groups, version=0):
        result = policy._backward(batch)
        ends = np.cumsum([len(r) for r in batch.rollouts])[:-1].tolist()
        for rollout, values in zip(batch.rollouts, torch.tensor_split(result.logprobs_R, ends), strict=True):
            results[rollout.serial, rollout.index] = values
    for group in groups:
        expected = plain.logprobs(twin, group.prompt.tokens, [r.tokens.tolist() for r in group.rollouts])
        for i, values in enumerate(expected):
            if group.trains[i]:
                torch.testing.assert_close(results[group.serial, i], values.detach(), atol=1e-5, rtol=0)
    expected = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean"))
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same(found, {name: grad.float() for name, grad in expected.items()}, atol=1e-5, rtol=1e-4)


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 200),
    mode=st.sampled_from(MODES),
    overlong_filter=st.booleans(),
    share_prompts=st.booleans(),
    tree_tokens=st.sampled_from([0, 25, 512]),
    kl=st.sampled_from([0.0, 0.3]),
    turns=st.booleans(),
)
@settings(max_examples=60)
def test_the_gradient_is_that_of_the_definition_for_every_split_order_and_mode(
    seed, budget, mode, overlong_filter, share_prompts, tree_tokens, kl, turns
):
    groups = random_groups(seed, 4, 3, overlong_filter=overlong_filter, with_reference=kl > 0, turns=turns)
    if not groups:
        return
    order = np.random.default_rng(seed).permutation(len(groups))
    model = for_dapo(plain.in_float64(tiny_llama()))
    cfg = config(optim__max_tokens_per_micro_batch=budget, algorithm__loss_agg_mode=mode, algorithm__kl_loss_coef=kl)
    before = attention.TREE_TOKENS
    attention.TREE_TOKENS = tree_tokens
    try:
        loss, grads = packed_gradients(model, [groups[i] for i in order], cfg, share_prompts=share_prompts)
    finally:
        attention.TREE_TOKENS = before
    twin = plain.plain_copy(model)
    expected = plain.mini_batch_loss(twin, groups, mode, kl=kl)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
    assert_same(grads, plain.gradients(twin, expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "cispo", "sapo"])
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 200), chunk=st.sampled_from([3, 11, 256]))
@settings(max_examples=12)
def test_the_gradient_of_every_loss_is_that_of_its_definition_for_every_split(loss, seed, budget, chunk):
    """Micro-batches of any size, and chunks of the head that cut responses in two."""
    groups = random_groups(seed, 4, 3, turns=seed % 2 == 1)
    if not groups:
        return
    model = for_dapo(plain.in_float64(tiny_llama()))
    clip = {} if loss == "sapo" else {"algorithm__clip_ratio_low": 0.3, "algorithm__clip_ratio_high": 0.5}
    cfg = config(optim__max_tokens_per_micro_batch=budget, algorithm__loss=loss, **clip)
    before, head.CHUNK_TOKENS = head.CHUNK_TOKENS, chunk
    try:
        value, grads = packed_gradients(model, groups, cfg)
    finally:
        head.CHUNK_TOKENS = before
    twin, mode = plain.plain_copy(model), cfg.algorithm.loss_agg_mode
    expected = plain.mini_batch_loss(twin, groups, mode, low=0.3, high=0.5, c=math.inf, loss=loss)
    assert value == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
    assert_same(grads, plain.gradients(twin, expected), atol=1e-6, rtol=1e-6)


def sampled_nearly_by(model, groups: list[Group], seed: int) -> list[Group]:
    """Give every token the model's log-probability with some noise, as another program would."""
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        exact = plain.logprobs(model, group.prompt.tokens, [r.tokens.tolist() for r in group.rollouts])
        noisy = [values.detach().numpy() + rng.normal(0, 0.7, len(values)) for values in exact]
        rollouts = [replace(r, logprobs=old.astype(np.float32)) for r, old in zip(group.rollouts, noisy, strict=True)]
        found.append(replace(group, rollouts=tuple(rollouts)))
    return found


@pytest.mark.parametrize("correction", ["token-truncated", "token-masked", "sequence-truncated", "sequence-masked"])
@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_the_corrected_gradient_is_that_of_the_definition_for_every_split(correction, budget, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 7)
    model = for_dapo(plain.in_float64(tiny_llama()))
    twin = plain.plain_copy(model)
    groups = sampled_nearly_by(twin, random_groups(2, 4, 3, with_reference=True), seed=2)
    cfg = config(
        optim__max_tokens_per_micro_batch=budget,
        algorithm__importance_correction=correction,
        algorithm__kl_loss_coef=0.3,
    )
    value, grads = packed_gradients(model, groups, cfg)
    expected = plain.mini_batch_loss(twin, groups, "token-mean", correct=correction, kl=0.3)
    assert value == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
    assert_same(grads, plain.gradients(twin, expected), atol=1e-6, rtol=1e-6)
    metrics = Policy(model, cfg).update(groups, step=1, version=0).metrics
    assert 0.1 < metrics[f"correction/{correction.partition('-')[2]}"] < 0.9, "choose data of which some is limited"


def test_the_correction_uses_the_weights_at_the_start_of_the_step_for_every_mini_batch():
    groups = random_groups(3, 6, 4)
    options = {"algorithm__importance_correction": "token-truncated", "optim__warmup_steps": 0}
    several = {**options, "optim__ppo_mini_batch_size": 2, "optim__ppo_epochs": 2}
    still, once, moving = (
        Policy(for_dapo(plain.in_float64(tiny_llama())), config(**{"optim__lr": lr, **chosen})).update(groups, 1, 0)
        for lr, chosen in ((1e-30, several), (1e-30, options), (1e-2, several))
    )
    for name in ("correction/weight", "correction/truncated", "ratio"):
        assert still.metrics[name] == pytest.approx(once.metrics[name], rel=1e-5)
    assert once.metrics["ratio"] == 1
    assert moving.metrics["correction/weight"] == pytest.approx(once.metrics["correction/weight"], rel=1e-5)
    assert abs(moving.metrics["ratio"] - 1) > 1e-3


def test_with_a_correction_a_sampler_that_disagrees_does_not_stop_the_run():
    result = Policy(for_dapo(tiny_llama()), config(algorithm__importance_correction="token-masked")).update(
        random_groups(8, 3, 4), step=1, version=0
    )
    assert result.stop is None
    assert result.updates == 1
    assert result.metrics["logprob_gap/mean"] > 0.05
    assert 0 < result.metrics["correction/masked"] < 1


def test_the_correction_is_on_by_default_with_vllm_only():
    assert UpdateRules.of(config()).correction == "none"
    assert UpdateRules.of(config(rollout__engine="vllm")).correction == "token-truncated"
    assert UpdateRules.of(config(cluster__rollout_workers={"vllm": 1, "embedded": 1})).correction == "token-truncated"
    chosen = config(rollout__engine="vllm", algorithm__importance_correction="none")
    assert UpdateRules.of(chosen).correction == "none"


def test_temperature_scales_the_logits_in_the_loss_too():
    model = for_dapo(plain.in_float64(tiny_llama()))
    groups = random_groups(3, 3, 4)
    _, grads = packed_gradients(model, groups, config(rollout__temperature=0.7))
    twin = plain.plain_copy(model)
    expected = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean", temperature=0.7))
    assert_same(grads, expected, atol=1e-6, rtol=1e-6)


def test_an_untied_head_gets_its_own_gradient():
    model = for_dapo(plain.in_float64(tiny_llama(tie_word_embeddings=False)))
    groups = random_groups(4, 3, 4)
    _, grads = packed_gradients(model, groups, config())
    twin = plain.plain_copy(model)
    expected = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean"))
    assert "lm_head.weight" in expected
    assert_same(grads, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_one_optimizer_step_gives_the_oracle_s_new_weights(share_prompts):
    model = for_dapo(plain.in_float64(tiny_llama()))
    groups = random_groups(5, 6, 4)
    twin = plain.plain_copy(model)
    grads = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean"))
    expected = plain.adamw(dict(twin.named_parameters()), grads, lr=1e-3, weight_decay=0.1, clip=0.5)
    cfg = config(optim__lr=1e-3, optim__warmup_steps=0, optim__grad_clip=0.5, algorithm__max_logprob_gap=100.0)
    result = Policy(model, cfg, share_prompts=share_prompts).update(groups, step=1, version=0)
    assert_same(dict(model.named_parameters()), {n: v.detach() for n, v in expected.items()}, atol=1e-9, rtol=1e-6)
    norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_no_mini_batch_is_empty_whatever_the_sizes():
    from dapo.policy.packing import mini_batches

    for batch_size in range(1, 6):
        for size in range(1, batch_size + 1):
            for count in range(1, 12):
                groups = [make.group([0.0, 1.0], serial=i) for i in range(count)]
                parts = mini_batches(groups, size, seed=0, step=1, epoch=0, batch_size=batch_size)
                assert all(parts)
                assert sorted(group.serial for part in parts for group in part) == list(range(count))


def test_mini_batches_are_whole_groups_near_equal_and_each_group_is_used_once_per_epoch():
    from dapo.policy.packing import mini_batches

    groups = random_groups(6, 11, 2)
    parts = mini_batches(groups, 4, seed=0, step=3, epoch=0, batch_size=11)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= 4
    assert max(sizes) - min(sizes) <= 1
    assert sorted(group.serial for part in parts for group in part) == sorted(group.serial for group in groups)
    again = mini_batches(groups, 4, seed=0, step=3, epoch=0, batch_size=11)
    assert [[g.serial for g in part] for part in parts] == [[g.serial for g in part] for part in again]
    other = mini_batches(groups, 4, seed=0, step=4, epoch=0, batch_size=11)
    assert [[g.serial for g in part] for part in parts] != [[g.serial for g in part] for part in other]


@pytest.mark.parametrize(
    ("groups", "size", "expected"),
    [(8, 8, [8]), (11, 8, [11]), (11, 4, [6, 5]), (17, 8, [9, 8]), (40, 8, [8] * 5), (3, 8, [3]), (5, 4, [3, 2])],
)
def test_a_batch_that_grew_by_a_few_groups_makes_as_many_updates_as_a_whole_one(groups, size, expected):
    from dapo.policy.packing import mini_batches

    parts = mini_batches(random_groups(6, 80, 2)[:groups], size, seed=0, step=1, epoch=0, batch_size=8)
    assert [len(part) for part in parts] == expected


def test_warm_up_counts_trainer_steps():
    policy = Policy(for_dapo(tiny_llama()), config(optim__lr=1.0, optim__warmup_steps=4))
    assert [policy.rules.learning_rate(step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_a_gradient_that_is_not_finite_changes_no_weight_and_three_in_a_row_stop_the_run():
    model = for_dapo(tiny_llama())
    groups = random_groups(7, 3, 4)
    bad = [
        Group(
            g.serial, g.prompt, g.rollouts, g.scores, g.rewards, np.full_like(g.advantages, np.inf), g.trains, g.verdict
        )
        for g in groups
    ]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = Policy(model, config(algorithm__max_logprob_gap=100.0))
    for _ in range(2):
        metrics = policy.update(bad, step=1, version=0).metrics
        assert metrics["updates/non_finite"] == 1
        assert metrics["updates"] == 0
    assert "3 optimizer steps in a row" in policy.update(bad, step=1, version=0).stop
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not policy.optimizer.adam.state


def test_a_finite_step_resets_the_count_of_non_finite_ones():
    groups = random_groups(7, 3, 4)
    bad = [
        Group(
            g.serial, g.prompt, g.rollouts, g.scores, g.rewards, np.full_like(g.advantages, np.nan), g.trains, g.verdict
        )
        for g in groups
    ]
    policy = Policy(for_dapo(tiny_llama()), config(algorithm__max_logprob_gap=100.0))
    for part in (bad, bad, groups, bad, bad):
        policy.update(part, step=1, version=0)
    assert policy.non_finite_in_a_row == 2


def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run_before_any_update():
    model = for_dapo(tiny_llama())
    before = model.model.embed_tokens.weight.detach().clone()
    result = Policy(model, config()).update(random_groups(8, 3, 4), step=1, version=0)
    assert "max_logprob_gap" in result.stop
    assert result.metrics["updates"] == 0
    assert torch.equal(before, model.model.embed_tokens.weight)


def test_groups_of_an_older_version_do_not_count_in_the_gap():
    metrics = Policy(for_dapo(tiny_llama()), config()).update(random_groups(8, 3, 4), step=1, version=5).metrics
    assert "logprob_gap/mean" not in metrics


@pytest.mark.parametrize("changes", [{"weight_version": 4}, {"weight_version": 4, "switches": (1,)}])
def test_groups_with_a_single_older_token_do_not_count_in_the_gap(changes):
    """Only the last response has an older token, so all of them must be checked."""
    current = [
        replace(g, rollouts=tuple(replace(r, weight_version=5) for r in g.rollouts)) for g in random_groups(8, 3, 4)
    ]
    assert "logprob_gap/mean" in Policy(for_dapo(tiny_llama()), config()).update(current, step=1, version=5).metrics
    older = [replace(g, rollouts=(*g.rollouts[:-1], replace(g.rollouts[-1], **changes))) for g in current]
    metrics = Policy(for_dapo(tiny_llama()), config()).update(older, step=1, version=5).metrics
    assert "logprob_gap/mean" not in metrics


def test_bf16_weights_move_by_their_fp32_masters_where_bf16_alone_would_round_to_nothing():
    groups = random_groups(9, 3, 4)
    model = for_dapo(tiny_llama().bfloat16())
    cfg = config(optim__lr=1e-6, optim__warmup_steps=0, optim__weight_decay=0.0, algorithm__max_logprob_gap=100.0)
    policy = Policy(model, cfg)
    start = [master.clone() for master in policy.optimizer.masters]
    for step in range(3):
        policy.update(groups, step, version=9)
    moved = [(master - old).abs().max().item() for master, old in zip(policy.optimizer.masters, start, strict=True)]
    assert max(moved) == pytest.approx(3e-6, rel=0.2)
    # The weights follow on average: their change along the masters' change is as long as that. To the nearest, the
    # masters would not have left the bf16 numbers that they began as.
    changes = [master - old for master, old in zip(policy.optimizer.masters, start, strict=True)]
    followed = [
        (parameter.detach().float() - old).mul(change).sum()
        for parameter, old, change in zip(policy.optimizer.parameters, start, changes, strict=True)
    ]
    wanted = sum(change.square().sum() for change in changes)
    assert (sum(followed) / wanted).item() == pytest.approx(1, abs=0.3)
    for parameter, master in zip(policy.optimizer.parameters, policy.optimizer.masters, strict=True):
        below, above = (torch.nextafter(master.bfloat16(), torch.tensor(side).bfloat16()) for side in (-9.0, 9.0))
        assert ((below <= parameter) & (parameter <= above)).all()


def test_bf16_gradients_are_summed_in_fp32_over_micro_batches():
    groups = random_groups(11, 6, 4)
    sums = {}
    for budget in (1, 4096):
        policy = Policy(
            for_dapo(tiny_llama().bfloat16()),
            config(optim__max_tokens_per_micro_batch=budget, algorithm__loss_agg_mode="seq-mean-token-sum"),
        )
        policy.optimizer.zero_grad_buffers()
        for batch in policy._micro_batches(groups, version=0):
            policy._backward(batch)
        assert all(parameter.grad is None for parameter in policy.optimizer.parameters)
        sums[budget] = [master.grad for master in policy.optimizer.masters]
        assert all(grad.dtype == torch.float32 for grad in sums[budget])
    for many, one in zip(sums[1], sums[4096], strict=True):
        assert (many - one).norm() < 0.02 * one.norm()


def test_token_statistics_are_those_of_the_first_update():
    model = for_dapo(plain.in_float64(tiny_llama()))
    groups = random_groups(10, 4, 3)
    twin = plain.plain_copy(model)
    cfg = config(optim__ppo_epochs=3, optim__lr=1e-2, optim__warmup_steps=0, algorithm__max_logprob_gap=100.0)
    stats = Policy(model, cfg).update(groups, step=1, version=0).token_stats
    assert set(stats) == {(g.serial, i) for g in groups for i in range(3) if g.trains[i]}
    for group in groups:
        expected = plain.logprobs(twin, group.prompt.tokens, [r.tokens.tolist() for r in group.rollouts])
        for i, values in enumerate(expected):
            if group.trains[i]:
                np.testing.assert_allclose(stats[group.serial, i].logprobs, values.detach().numpy(), atol=1e-5)


def test_metrics_and_token_statistics_leave_out_what_an_environment_gave():
    """A second run in which the given tokens' log-probabilities are nonsense gives the same metrics."""
    results = []
    for nonsense in (0.0, -50.0):
        groups = []
        for group in random_groups(3, 4, 3, turns=True):
            rollouts = [replace(r, logprobs=np.where(r.is_own, r.logprobs, nonsense)) for r in group.rollouts]
            groups.append(replace(group, rollouts=tuple(rollouts)))
        results.append(Policy(for_dapo(tiny_llama()), config(algorithm__max_logprob_gap=99)).update(groups, 1, 0))
    assert results[0].metrics == results[1].metrics
    assert any(r.given for group in groups for r in group.rollouts)
    for group in groups:
        for rollout in (r for r, trains in zip(group.rollouts, group.trains, strict=True) if trains):
            stats = results[0].token_stats[rollout.serial, rollout.index]
            for values in stats:
                assert len(values) == len(rollout)
                assert (values[~rollout.is_own] == 0).all() and (values[rollout.is_own] != 0).all()


def test_entropy_is_that_of_the_whole_distribution():
    model = for_dapo(plain.in_float64(tiny_llama()))
    group = make.group([1.0, 0.0], [1, 1])
    twin = plain.plain_copy(model)
    logits = twin(input_ids=torch.tensor([group.prompt.tokens])).logits[0, -1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    metrics = Policy(model, config(algorithm__max_logprob_gap=100.0)).update([group], 1, 0).metrics
    assert metrics["entropy"] == pytest.approx(float(expected.detach()), rel=1e-6)


def test_gradients_of_a_shared_predictor_add_up_in_float32():
    hidden = torch.randn(3, 4).to(torch.bfloat16).requires_grad_()
    predictors = torch.tensor([1] * 300 + [2])
    upstream = torch.full((301, 4), 1.0, dtype=torch.bfloat16)
    gather_predictors(hidden, predictors).backward(upstream)
    # In bf16 the sum would stop at 256, where adding 1 rounds to nothing.
    assert hidden.grad.tolist() == [[0.0] * 4, [300.0] * 4, [1.0] * 4]
