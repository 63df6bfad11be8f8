"""Test in-flight sampling with a scripted engine, where every length is known, and in whole runs on a tiny model."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from dapo import Config, Trainer
from dapo.algorithm import forecast
from dapo.checkpoint import folder as checkpoint
from dapo.config import apply_override, option_names
from dapo.data.stream import PromptStream, ShuffledSource
from dapo.errors import RewardError
from dapo.sampling.accounting import Sampled
from dapo.sampling.inflight import InflightSampler
from dapo.sampling.strict import DynamicSampler
from dapo.store.database import RunDatabase
from dapo.types import Prompt, Request, Rollout, Score
from tests import make, plain, runs

ROOT = Path(__file__).parent.parent.parent
Lengths = Callable[[int, int], int]


class ScriptedEngine:
    """Samples one token per turn for each of the first `max_concurrent` responses. Their lengths are scripted."""

    def __init__(self, length: Lengths, max_concurrent: int = 10_000) -> None:
        self.length = length
        self.max_concurrent = max_concurrent
        self.version = 0
        self.in_flight: list[list[Any]] = []  # [request, index, first version, switches, tokens]
        self.submitted: list[int] = []
        self.busy: list[int] = []  # unfinished groups at each poll

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted += [request.serial for request in requests]
        self.in_flight += [[request, index, None, [], 0] for request in requests for index in range(request.n)]

    def poll(self) -> list[Rollout]:
        self.busy.append(len({seq[0].serial for seq in self.in_flight}))
        finished: list[Rollout] = []
        while self.in_flight and not finished:
            for seq in self.in_flight[: self.max_concurrent]:
                if seq[2] is None:
                    seq[2] = self.version
                seq[4] += 1
                if seq[4] == self.length(seq[0].serial, seq[1]):
                    finished.append(self._rollout(*seq))
            gone = {(rollout.serial, rollout.index) for rollout in finished}
            self.in_flight = [seq for seq in self.in_flight if (seq[0].serial, seq[1]) not in gone]
        return finished

    def sync_weights(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version
        for seq in self.in_flight:
            if seq[2] is not None:
                seq[3].append(seq[4])

    def cancel(self, serials: Iterable[int]) -> int:
        raise NotImplementedError

    def close(self) -> None: ...

    def _rollout(self, request: Request, index: int, version: int, switches: list[int], tokens: int) -> Rollout:
        zeros = np.zeros(tokens)
        return Rollout(
            request.serial, index, zeros.astype(np.int32), zeros.astype(np.float32), "stop", version, "", (*switches,)
        )


class Slow:
    """A judge that returns scripted scores after random delays, from other threads and in any order."""

    def __init__(self, judge: Callable[[Prompt, Rollout], Score], seed: int) -> None:
        self.judge = judge
        self.rng = np.random.default_rng(seed)

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        scores = [self.judge(prompt, rollout) for rollout in rollouts]
        threading.Timer(float(self.rng.uniform(0, 0.004)), future.set_result, [scores]).start()
        return future

    def close(self) -> None: ...


def sampler_for(
    length: Lengths, is_mixed: Callable[[int], bool] = lambda serial: True, *overrides: str, judge: Any = None
) -> InflightSampler:
    base: dict[str, Any] = {
        "model": {"path": "tiny"},
        "data": {"train": "none", "train_batch_size": 4, "max_response_length": 64},
        "rollout": {"n": 2, "mode": "inflight"},
    }
    for override in overrides:
        apply_override(base, override, option_names())
    config = Config.parse(base)
    prompts = [Prompt(f"p{i}", (), (40 + i,), answer=i) for i in range(5)]
    engine = ScriptedEngine(length, config.rollout.max_concurrent or 64)
    judge = judge or make.Scripted(scores(is_mixed))
    return InflightSampler(config, engine, judge, PromptStream([ShuffledSource(prompts, config.run.seed)]))


def scores(is_mixed: Callable[[int], bool]) -> Callable[[Prompt, Rollout], Score]:
    return lambda prompt, rollout: Score(float(rollout.index) if is_mixed(rollout.serial) else 0.0)


def advance(sampler: DynamicSampler, step: int, version: int) -> Sampled:
    """Sample one step and make its update."""
    sampled = sampler.fill(step, version)
    if sampled.batch:
        sampler.engine.sync_weights(version + 1)
    return sampled


def serials(groups: Iterable[Any]) -> list[int]:
    return [group.serial for group in groups]


def ages(sampled: Sampled) -> np.ndarray:
    trained = [
        rollout
        for group in sampled.batch
        for rollout, trains in zip(group.rollouts, group.trains, strict=True)
        if trains
    ]
    return np.concatenate([sampled.version - rollout.versions for rollout in trained] or [np.zeros(1)])


def assert_tokens_add_up(tokens: Any) -> None:
    dropped = sum(value for name, value in tokens.items() if name.startswith("tokens/dropped/"))
    kinds = ("trained", "masked", "stale", "carried_out")
    gone = dropped + sum(tokens[f"tokens/{kind}"] for kind in kinds)
    assert tokens["tokens/carried_in"] + tokens["tokens/generated"] == gone


def test_a_full_batch_does_not_wait_for_a_long_group_which_is_trained_on_in_the_next_step():
    sampler = sampler_for(lambda serial, index: 10 if serial == 1 else 3, lambda serial: True)
    first = advance(sampler, 1, 0)
    assert serials(first.batch) == [0, 2, 3, 4]
    assert 1 in sampler.pending
    second = advance(sampler, 2, 1)
    assert serials(second.batch)[0] == 1
    (long, _) = second.batch[0].rollouts
    assert (long.weight_version, long.switches) == (0, (6,))
    assert long.versions.tolist() == [0] * 6 + [1] * 4
    assert second.metrics()["staleness/max"] == 1


def test_a_group_that_would_become_too_old_is_waited_for_and_comes_first():
    sampler = sampler_for(lambda serial, index: 60 if serial == 1 else 3, lambda serial: True)
    advance(sampler, 1, 0)
    second = advance(sampler, 2, 1)
    assert serials(second.batch)[0] == 1
    assert len(second.batch[0].rollouts[0]) == 60
    assert second.batch[0].rollouts[0].switches == (6,)


def test_with_more_staleness_allowed_a_long_group_is_waited_for_later():
    sampler = sampler_for(
        lambda serial, index: 60 if serial == 1 else 3, lambda serial: True, "algorithm.max_staleness=3"
    )
    batches = [advance(sampler, step, step - 1) for step in range(1, 5)]
    assert [1 in serials(sampled.batch) for sampled in batches] == [False, False, False, True]
    assert batches[3].batch[0].rollouts[0].versions[[0, -1]].tolist() == [0, 3]


def test_the_engine_is_kept_busy_across_updates():
    sampler = sampler_for(lambda serial, index: 5 + serial % 7, lambda serial: True)
    for step in range(1, 6):
        advance(sampler, step, step - 1)
    assert set(sampler.engine.busy) == {4}


def test_the_batch_is_the_first_submitted_of_the_decided_kept_groups():
    sampler = sampler_for(lambda serial, index: 1 + (7 * serial) % 5, lambda serial: True, "data.gen_batch_size=8")
    for step in range(1, 8):
        sampled = advance(sampler, step, step - 1)
        assert serials(sampled.batch) == sorted(serials(sampled.batch))
        if sampler.carried:
            assert max(serials(sampled.batch)) < min(serials(sampler.carried))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=11),
    pattern=st.lists(st.sampled_from(["mixed", "mixed", "flat", "unjudged", "partly_judged"]), min_size=1, max_size=7),
    gen=st.integers(1, 9),
    staleness=st.integers(1, 3),
    limit=st.integers(0, 3),
    exhausted=st.sampled_from(["train_partial", "skip", "pad"]),
    concurrent=st.integers(1, 20),
    updates=st.lists(st.booleans(), min_size=8, max_size=8),
    drains=st.lists(st.booleans(), min_size=8, max_size=8),
)
@settings(max_examples=80)
def test_no_token_is_too_old_or_lost_and_no_group_is_split_or_trained_twice(
    lengths, pattern, gen, staleness, limit, exhausted, concurrent, updates, drains
):
    if limit == 0 and "mixed" not in pattern:
        return  # without a limit and without kept groups, sampling never ends, by design

    sampler = sampler_for(
        lambda serial, index: lengths[(3 * serial + index) % len(lengths)], lambda serial: True,
        "rollout.n=3", f"data.gen_batch_size={gen}", f"algorithm.max_staleness={staleness}",
        f"algorithm.filter_groups.max_num_gen_batches={limit}", f"algorithm.filter_groups.on_exhausted={exhausted}",
        f"rollout.max_concurrent={concurrent}", judge=make.Scripted(make.judge_by(pattern)),
    )  # fmt: skip
    trained: list[int] = []
    decided: list[int] = []
    carried_out = version = 0
    for step, (moves, drains_now) in enumerate(zip(updates, drains, strict=True), start=1):
        before = sampler.next_serial
        try:
            sampled = sampler.fill(step, version)
        except RewardError:
            assert step == 1
            return
        assert_tokens_add_up(sampled.tokens)
        assert sampled.tokens["tokens/carried_in"] == carried_out
        carried_out = sampled.tokens["tokens/carried_out"]
        assert ages(sampled).max() <= staleness
        assert ages(sampled).min() >= 0
        assert sampled.metrics()["groups/in_flight"] == len(sampler.pending)
        assert all([r.index for r in group.rollouts] == [0, 1, 2] for group in sampled.groups)
        too_old_later = sum(version + 1 - group.weight_version > staleness for group in sampled.batch)
        assert len(sampled.batch) <= max(4, too_old_later), "the batch grows only by groups that could not wait"
        assert limit == 0 or sampler.next_serial - before <= limit * gen
        assert sampled.batch or not sampler.pending, "the batch is empty, but groups are in flight"
        trained += serials(sampled.batch)
        decided += [group.serial for group in sampled.groups if group.verdict != "carried"]
        if sampled.batch and moves:
            version += 1
            sampler.engine.sync_weights(version)
        if drains_now:
            sampler.drain()
            assert not sampler.engine.in_flight
    assert len(trained) == len(set(trained))
    assert sorted([*decided, *serials(sampler.carried), *sampler.pending]) == list(range(sampler.next_serial))


@pytest.mark.parametrize(
    ("size", "in_flight", "keep", "staleness"),
    [(8, 24, 0.5, 1), (16, 48, 0.5, 1), (8, 32, 0.25, 1), (32, 64, 0.7, 1), (8, 48, 0.5, 2)],
)
def test_none_is_dropped_for_its_age_while_the_keep_rate_varies_at_random(size, in_flight, keep, staleness):
    """300 steps with log-normal lengths. Every kept group is trained on, and the batch stays close to its size."""
    rng = np.random.default_rng(7)
    lengths = np.clip(np.exp(rng.normal(3, 0.8, (20_000, 2))), 1, 400).astype(int)
    kept = rng.random(20_000) < keep
    sampler = sampler_for(
        lambda serial, index: int(lengths[serial, index]), lambda serial: bool(kept[serial]),
        f"data.train_batch_size={size}", f"data.gen_batch_size={in_flight}", "data.max_response_length=400",
        f"algorithm.max_staleness={staleness}",
    )  # fmt: skip
    batches, decided = [], set()
    for step in range(1, 301):
        sampled = advance(sampler, step, step - 1)
        assert ages(sampled).max() <= staleness
        batches.append(serials(sampled.batch))
        decided |= sampled.fresh
    trained = {serial for batch in batches for serial in batch}
    assert trained == {serial for serial in decided if kept[serial]} - set(serials(sampler.carried))
    assert size <= np.mean([len(batch) for batch in batches]) <= 1.12 * size


def test_a_group_that_cannot_wait_comes_before_newer_groups_with_lower_serials():
    """As on a cluster, where a group of a lost worker is sampled again with newer weights."""
    sampler = sampler_for(lambda serial, index: 3, lambda serial: True)
    for serial, version in enumerate([1, 1, 1, 1, 1, 0]):
        group = make.group([0.0, 1.0], serial=serial)
        rollouts = tuple(replace(rollout, weight_version=version) for rollout in group.rollouts)
        sampler.carried.append(replace(group, rollouts=rollouts).with_verdict("carried"))
    sampler.next_serial = 6
    sampler.engine.sync_weights(1)
    sampled = advance(sampler, 2, 1)
    assert serials(sampled.batch) == [5, 0, 1, 2]
    assert serials(advance(sampler, 3, 2).batch)[:2] == [3, 4]
    assert {group.verdict for group in sampled.groups} == {"kept", "carried"}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    gen=st.integers(1, 12),
    staleness=st.integers(1, 3),
    concurrent=st.integers(1, 30),
)
@settings(max_examples=40)
def test_no_group_is_dropped_for_being_long_and_none_is_left_behind(lengths, gen, staleness, concurrent):
    """The filter keeps every group, so every group is trained on within `max_staleness` steps, whatever its length."""
    sampler = sampler_for(
        lambda serial, index: lengths[(serial + index) % len(lengths)], lambda serial: True,
        f"data.gen_batch_size={gen}", f"algorithm.max_staleness={staleness}", f"rollout.max_concurrent={concurrent}",
    )  # fmt: skip
    submitted_before: dict[int, int] = {}
    trained: set[int] = set()
    for step in range(1, 9):
        sampled = advance(sampler, step, step - 1)
        assert {group.verdict for group in sampled.groups} <= {"kept", "carried"}
        submitted_before[step] = sampler.next_serial
        trained |= set(serials(sampled.batch))
        if step > staleness:
            assert set(range(submitted_before[step - staleness])) <= trained


def test_a_carried_group_is_as_old_as_its_oldest_response():
    sampler = sampler_for(lambda serial, index: 3)
    group = make.group([0.0, 1.0], serial=0)
    first, second = group.rollouts
    mixed = replace(group, rollouts=(replace(first, weight_version=1), replace(second, weight_version=0)))
    sampler.next_serial = 1
    for version, verdict in ((1, "kept"), (2, "stale")):
        sampler.carried = [mixed.with_verdict("carried")]
        assert sampler.fill(version, version).groups[0].verdict == verdict


def test_the_arrival_time_of_rewards_changes_nothing():
    def flow(judge: Any) -> list[Any]:
        sampler = sampler_for(
            lambda serial, index: 1 + (5 * serial + 3 * index) % 13, lambda serial: True,
            "data.gen_batch_size=6", "rollout.max_concurrent=7", "algorithm.ledger={enable: true}", judge=judge,
        )  # fmt: skip
        steps = [advance(sampler, step, step - 1) for step in range(1, 7)]
        order = [(group.serial, group.prompt.uid, group.verdict) for sampled in steps for group in sampled.groups]
        return [[serials(sampled.batch) for sampled in steps], order, sampler.engine.submitted]

    judge = scores(lambda serial: serial % 3 > 0)
    at_once = flow(make.Scripted(judge))
    assert all(flow(Slow(judge, seed)) == at_once for seed in range(3))


def test_groups_are_judged_while_others_are_sampled():
    sampler = sampler_for(lambda serial, index: 3 + serial, lambda serial: True)
    events: list[str] = []
    poll, submit = sampler.engine.poll, sampler.judge.submit
    sampler.engine.poll = lambda: (events.append("poll"), poll())[1]
    sampler.judge.submit = lambda *group: (events.append("judge"), submit(*group))[1]
    sampler.on_group = lambda group: events.append("decide")
    sampler.fill(1, 0)
    assert "poll" in events[events.index("judge") : events.index("decide")]


def test_a_step_submits_no_more_than_its_rounds_and_then_applies_on_exhausted():
    sampler = sampler_for(
        lambda serial, index: 1 + serial % 5, lambda serial: serial == 1,
        "data.gen_batch_size=3", "algorithm.filter_groups.max_num_gen_batches=2",
    )  # fmt: skip
    sampled = sampler.fill(1, 0)
    assert serials(sampled.batch) == [1]
    assert sampler.next_serial == 6
    assert not sampler.pending
    (event,) = sampled.events
    assert "2 rounds gave 1 of 4 groups" in event.message


def test_a_reward_that_judges_nothing_stops_the_run():
    broken = make.Scripted(lambda prompt, rollout: Score(None, error="ZeroDivisionError"))
    sampler = sampler_for(lambda serial, index: 1 + serial % 3, judge=broken)
    with pytest.raises(RewardError, match=r"judged none of the first \d+ groups; the first reason: ZeroDivisionError"):
        sampler.fill(1, 0)


def test_drained_groups_count_in_the_step_that_decides_them():
    sampler = sampler_for(lambda serial, index: 2 + serial % 4, lambda serial: True)
    advance(sampler, 1, 0)
    in_flight = list(sampler.pending)
    assert in_flight
    sampler.drain()
    assert not sampler.engine.in_flight
    assert list(sampler.pending) == in_flight
    second = advance(sampler, 2, 1)
    assert set(in_flight) <= second.fresh
    assert serials(second.batch)[: len(in_flight)] == in_flight


# Whole runs. Only 6 of the 24 responses of a round are decoded at a time, so that some responses span an update.
INFLIGHT = ("rollout.mode=inflight", "rollout.max_concurrent=6", "data.max_response_length=12")


def train(config: Config, **kwargs: Any) -> Any:
    trainer = Trainer(config, **kwargs)
    try:
        return trainer.train()
    finally:
        trainer.close()


def recorded(run_dir: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [(group, list(database.rollouts(group["serial"]))) for group in database.groups()]


def versions_of(row: dict[str, Any]) -> list[int]:
    """Return the weight version of each token, counted from the database row."""
    return [row["weight_version"] + sum(at <= place for at in row["switches"]) for place in range(row["length"])]


def watched(config: Config) -> tuple[Trainer, list[Any], list[tuple[int, list[Any]]]]:
    """Return a trainer that records the weights of every version and the batch of every update."""
    trainer = Trainer(config)
    models: list[Any] = []
    batches: list[tuple[int, list[Any]]] = []
    update = trainer.policy.update

    def recording(batch: Any, step: int, version: int) -> Any:
        assert version == len(models)
        models.append(plain.in_float64(plain.plain_copy(trainer.policy.causal_lm)))
        batches.append((step, serials(batch)))
        return update(batch, step, version)

    trainer.policy.update = recording
    return trainer, models, batches


@torch.no_grad()
def logprobs_as_sampled(models: list[Any], prompt: list[int], row: dict[str, Any]) -> list[float]:
    """Compute log-probabilities in plain transformers, each token with the weights that sampled it, on one cache."""
    versions, tokens, cache = versions_of(row), row["tokens"].tolist(), DynamicCache()
    inputs, found = prompt, []
    for version, token in zip(versions, tokens, strict=True):
        logits = models[version](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits
        found.append(float(logits[0, -1].log_softmax(-1)[token]))
        inputs = [token]
    return found


def test_each_token_keeps_the_log_probability_of_its_weight_version_and_the_loss_uses_it(tmp_path):
    config = runs.load(
        tmp_path, *INFLIGHT, "run.steps=4", "optim.lr=1e-2", "optim.warmup_steps=0", "optim.ppo_mini_batch_size=4"
    )
    trainer, models, batches = watched(config)
    trainer.train()
    stored = {group["serial"]: (group, rows) for group, rows in recorded(config.run_dir)}
    metrics = {step["step"]: step for step in runs.metrics(config.run_dir)}
    mixed = 0
    for step, batch in batches:
        now = models[step - 1]  # every step made one update
        ratios, losses, ages = [], [], []
        for serial in batch:
            group, rows = stored[serial]
            prompt = group["prompt_tokens"].tolist()
            advantages = plain.advantages([row["reward"] for row in rows])
            current = plain.logprobs(now, prompt, [row["tokens"].tolist() for row in rows])
            for row, advantage, new in zip(rows, advantages, current, strict=True):
                old = logprobs_as_sampled(models, prompt, row)
                np.testing.assert_allclose(row["sampler_logprobs"], old, atol=2e-5)
                np.testing.assert_allclose(row["policy_logprobs"], new.detach().numpy(), atol=2e-5)
                ratio = (new.detach() - torch.tensor(old)).exp()
                losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)))
                ratios.append(ratio)
                ages += [step - 1 - version for version in versions_of(row)]
                mixed += len(set(versions_of(row))) > 1
        assert metrics[step]["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=2e-5)
        assert metrics[step]["ratio"] == pytest.approx(float(torch.cat(ratios).mean()), abs=2e-5)
        assert metrics[step]["staleness/mean"] == pytest.approx(np.mean(ages))
        assert metrics[step]["staleness/max"] == max(ages) <= 1
    assert mixed > 5, "this test needs responses that span an update"
    assert len(batches) == 4


def test_with_constant_weights_the_recorded_log_probabilities_match_one_forward_pass(tmp_path):
    config = runs.load(
        tmp_path, *INFLIGHT, "run.steps=4", "optim.lr=1e-30", "optim.weight_decay=0", "run.store_tokens=all"
    )
    trainer, models, _ = watched(config)
    trainer.train()
    switched = 0
    for group, rows in recorded(config.run_dir):
        expected = plain.logprobs(models[0], group["prompt_tokens"].tolist(), [row["tokens"].tolist() for row in rows])
        for row, values in zip(rows, expected, strict=True):
            np.testing.assert_allclose(row["sampler_logprobs"], values.detach().numpy(), atol=2e-5)
            switched += bool(row["switches"])
    assert switched > 5


def test_the_same_run_twice_is_the_same_bit_for_bit_and_its_tokens_add_up(tmp_path):
    config, twin = (runs.load(tmp_path, *INFLIGHT, f"run.name={name}") for name in ("one", "two"))
    for one in (config, twin):
        train(one)
    weights, others = runs.weights(config.run_dir, 6), runs.weights(twin.run_dir, 6)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert runs.metrics(config.run_dir) == runs.metrics(twin.run_dir)
    assert runs.verdicts(config.run_dir) == runs.verdicts(twin.run_dir)
    steps = runs.metrics(config.run_dir)
    assert any(step["groups/in_flight"] for step in steps)
    for step in steps:
        assert_tokens_add_up(step)
    for before, after in pairwise(steps):
        assert before["tokens/carried_out"] == after["tokens/carried_in"]
    stored = recorded(config.run_dir)
    for step in steps:
        made = [rows for group, rows in stored if group["generated_step"] == step["step"]]
        assert step["groups/generated"] == len(made)
        assert step["tokens/generated"] == sum(row["length"] for rows in made for row in rows)


def test_an_evaluation_with_groups_in_flight_loses_none(tmp_path):
    config = runs.load(tmp_path, *INFLIGHT, "run.steps=4", "eval.k=2", "eval.every=1", "eval.temperature=0.5")
    train(config)
    assert any(step["groups/in_flight"] for step in runs.metrics(config.run_dir))
    assert_no_prompt_is_lost(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        assert [row["step"] for row in database.evals()] == [0, 1, 2, 3, 4]


def assert_no_prompt_is_lost(config: Config) -> None:
    """Check that every prompt of the stream, in order, is once in the database or in flight."""
    state = checkpoint.read_state(checkpoint.find(config.run_dir / "checkpoints", "last"))
    asked = {group["serial"]: group["prompt_uid"] for group, _ in recorded(config.run_dir)}
    assert not asked.keys() & state.sampler.pending.keys()
    asked |= {serial: drawn.prompt.uid for serial, drawn in state.sampler.pending.items()}
    assert sorted(asked) == list(range(state.sampler.next_serial))
    fresh = Trainer(config.model_copy(update={"run": config.run.model_copy(update={"name": "fresh"})}))
    expected = [prompt.uid for prompt in fresh.data.stream.take(state.sampler.next_serial)]
    fresh.close()
    assert [asked[serial] for serial in sorted(asked)] == expected


@pytest.mark.parametrize("then", ["inflight", "strict"])
def test_a_resumed_run_submits_groups_in_flight_again(tmp_path, then):
    config = runs.load(tmp_path, *INFLIGHT, "run.steps=3")
    train(config)
    saved = checkpoint.read_state(checkpoint.find(config.run_dir / "checkpoints", "last"))
    assert saved.sampler.pending, "this test needs groups in flight"
    longer = runs.load(tmp_path, *INFLIGHT, "run.steps=6", f"rollout.mode={then}", "eval.k=1", "eval.every=1")
    train(longer, resume=True)
    assert_no_prompt_is_lost(longer)
    again = {group["serial"]: (group, rows) for group, rows in recorded(longer.run_dir)}
    for serial, drawn in saved.sampler.pending.items():
        group, rows = again[serial]
        assert group["prompt_uid"] == drawn.prompt.uid
        assert group["generated_step"] > 3
        assert all(row["weight_version"] >= saved.version for row in rows)


def test_a_resumed_run_weights_groups_in_flight_by_the_chance_with_which_they_were_drawn(tmp_path):
    ledger = "algorithm.ledger={enable: true, correct: true, explore: 0.1}"
    config = runs.load(tmp_path, *INFLIGHT, ledger, "run.steps=9")
    trainer = Trainer(config)
    for _ in trainer.steps():
        if min((group.drawn.chance for group in trainer.sampler.pending.values()), default=1.0) < 1:
            break
    chances = {serial: group.drawn.chance for serial, group in trainer.sampler.pending.items()}
    assert min(chances.values()) < 1
    trainer = Trainer(config, resume=True)
    assert {serial: group.drawn.chance for serial, group in trainer.sampler.pending.items()} == chances
    trainer.close()


def test_a_resumed_run_that_looks_ahead_learns_from_the_groups_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "LEAST_GROUPS", 4)
    ledger = "algorithm.ledger={enable: true, lookahead: 3, explore: 0.1}"
    config = runs.load(tmp_path, *INFLIGHT, ledger, "run.steps=9")
    trainer = Trainer(config)
    for _ in trainer.steps():
        if any(group.drawn.outlook and group.drawn.outlook.forecast for group in trainer.sampler.pending.values()):
            break
    before = {serial: group.drawn.outlook for serial, group in trainer.sampler.pending.items()}
    assert any(outlook.forecast is not None for outlook in before.values())
    trainer = Trainer(config, resume=True)
    after = {serial: group.drawn.outlook for serial, group in trainer.sampler.pending.items()}
    assert after.keys() == before.keys()
    for serial, outlook in after.items():
        assert np.array_equal(outlook.features_K, before[serial].features_K)
        assert outlook.forecast == before[serial].forecast
    recorded, record = [], trainer.sampler.drawer.forecast.record
    trainer.sampler.drawer.forecast.record = lambda features, rate: (recorded.append(features), record(features, rate))
    trainer.train()
    for outlook in after.values():
        assert any(features is outlook.features_K for features in recorded)


# Kills the trainer during sampling, with groups in flight, as soon as there is a checkpoint: they are written in the
# background.
KILLER = """
import os, signal, sys, time
from dapo.sampling.inflight import InflightSampler
decide, count = InflightSampler._decide_finished, int(sys.argv[1])
seen = 0
def kill_or_decide(self, step):
    global seen
    seen += 1
    if seen == count:
        assert self.pending
        while not any(self.config.run_dir.glob("checkpoints/step_*")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    decide(self, step)
InflightSampler._decide_finished = kill_or_decide
from dapo.cli import main
sys.argv = ["dapo", *sys.argv[2:]]
main()
"""


@pytest.mark.slow
def test_a_run_killed_with_groups_in_flight_resumes_without_losing_a_prompt(tmp_path):
    overrides = [*INFLIGHT, "run.name=killed", "run.steps=5", "run.save_every=1"]
    config = runs.load(tmp_path, *overrides)
    command = ["train", str(tmp_path / "recipe.yaml"), *overrides]
    dead = subprocess.run([sys.executable, "-c", KILLER, "4", *command], cwd=ROOT, capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert checkpoint.newest(config.run_dir / "checkpoints") is not None
    again = subprocess.run(
        [sys.executable, "-m", "dapo", *command, "--resume"], cwd=ROOT, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert len(runs.metrics(config.run_dir)) == 5
    assert_no_prompt_is_lost(config)


@pytest.mark.parametrize("coefficient", ["kl_loss_coef", "kl_reward_coef"])
def test_groups_that_span_an_update_get_reference_log_probabilities(tmp_path, coefficient):
    config = runs.load(tmp_path, *INFLIGHT, f"algorithm.{coefficient}=0.1", "run.steps=3")
    trainer, models, batches = watched(config)
    groups: dict[int, Any] = {}
    fill = trainer.sampler.fill

    def recording(number: int, version: int) -> Sampled:
        sampled = fill(number, version)
        groups.update({group.serial: group for group in sampled.batch})
        return sampled

    trainer.sampler.fill = recording
    trainer.train()
    assert any(rollout.switches for group in groups.values() for rollout in group.rollouts)
    for group in groups.values():
        expected = plain.logprobs(models[0], group.prompt.tokens, [r.tokens.tolist() for r in group.rollouts])
        for found, values in zip(group.ref_logprobs, expected, strict=True):
            np.testing.assert_allclose(found, values.detach().numpy(), atol=2e-5)
    assert len(batches) == 3


@pytest.mark.parametrize("differs", [False, True])
def test_groups_that_differ_only_in_the_length_penalty_are_counted_and_warned_of_once(differs):
    options = ("reward.length_shaping=buffer", "reward.overlong_buffer.len=32", "algorithm.filter_groups.enable=false")
    sampler = sampler_for(lambda serial, index: 10 if index else 60, lambda serial: differs, *options)
    first, second = (advance(sampler, step, step - 1) for step in (1, 2))
    for sampled in (first, second):
        assert all(group.advantages.any() for group in sampled.batch)
        assert sampled.metrics()["groups/equal_scores"] == (0 if differs else 4)
    assert [(event.kind, event.step) for event in (*first.events, *second.events)] == (
        [] if differs else [("length", 1)]
    )
    if not differs:
        assert "in 4 of 4 groups all scores are equal and only the length penalty differs" in first.events[0].message
        assert "set algorithm.filter_groups.enable to true to drop such groups" in first.events[0].message


def test_the_warning_of_equal_scores_names_the_option_that_drops_such_groups():
    shaping = ("reward.length_shaping=buffer", "reward.overlong_buffer.len=32")
    sampler = sampler_for(
        lambda serial, index: 10 if index else 60,
        lambda serial: False,
        *shaping,
        "algorithm.filter_groups.metric=seq_reward",
    )
    sampled = advance(sampler, 1, 0)
    assert sampled.metrics()["groups/equal_scores"] == 4
    assert "set algorithm.filter_groups.metric to score to drop such groups" in sampled.events[0].message
