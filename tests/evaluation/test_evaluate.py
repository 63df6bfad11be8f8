"""Tests of an evaluation with the real engine on a tiny model: its samples, its scores and its metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import LearnerLost
from dapo.evaluation.evaluate import Interrupted, evaluate, metric_names, metrics_by_problem
from dapo.model.attention import ATTENTION_NAME
from dapo.types import EvalSample, Prompt, Rollout, SamplingParams, Score
from tests import make
from tests.tiny import EOS_ID, tiny_llama, tiny_tokenizer

K = 6
PARAMS = SamplingParams(max_tokens=4)


class ThreadJudge:
    """Judges in another thread, as real judges do, and remembers the order of the groups."""

    def __init__(self, score: Callable[[Rollout], Score]) -> None:
        self.score = score
        self.asked: list[int] = []
        self.pool = ThreadPoolExecutor(1)

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        assert [rollout.index for rollout in rollouts] == list(range(K)), "a group is submitted whole and in order"
        self.asked.append(rollouts[0].serial)
        return self.pool.submit(lambda: [self.score(rollout) for rollout in rollouts])

    def close(self) -> None:
        self.pool.shutdown()


def letters(rollout: Rollout) -> Score:
    """Score by the sum of the tokens: the answer is the sum modulo 3, and unreadable if 5 divides the sum."""
    total = int(rollout.tokens.sum())
    extracted = None if total % 5 == 0 else str(total % 3)
    return Score(total / 100, acc=extracted == "1", extras={"extracted": extracted})


def sometimes(rollout: Rollout) -> Score:
    return Score(None, error="no") if rollout.index % 2 or rollout.serial % 4 == 1 else letters(rollout)


@pytest.fixture(scope="module")
def engine():
    model = tiny_llama(attn_implementation=ATTENTION_NAME).requires_grad_(False)
    return EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), seed=0, max_concurrent=4)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", ({"role": "user", "content": "?"},), (1, 5 + i, 9), 1) for i in range(count)]


def run(engine: Any, score: Callable[[Rollout], Score] = letters, count: int = 5, step: int = 0, **options: Any):
    judge = ThreadJudge(score)
    try:
        return evaluate(engine, judge, prompts(count), K, PARAMS, step, "set", **options)
    finally:
        judge.close()


def by_problem(report) -> dict[str, list[EvalSample]]:
    groups: dict[str, list[EvalSample]] = {}
    for sample in report.samples:
        groups.setdefault(sample.prompt.uid, []).append(sample)
    return groups


def test_every_sample_appears_once_in_order_with_its_own_score(engine):
    seen = []
    report = run(engine, on_sample=lambda done, total: seen.append((done, total)))
    order = [(sample.prompt.uid, sample.rollout.index) for sample in report.samples]
    assert order == [(f"p{i}", j) for i in range(5) for j in range(K)]
    assert all(sample.score == letters(sample.rollout) for sample in report.samples)
    assert seen[-1] == (30, 30)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_groups_are_judged_while_the_engine_still_samples(engine):
    unfinished = []

    class Watching(ThreadJudge):
        def submit(self, prompt, rollouts):
            unfinished.append(len(engine.waiting) + len(engine.active))
            return super().submit(prompt, rollouts)

    evaluate(engine, Watching(letters), prompts(5), K, PARAMS, 0, "set")
    assert unfinished[0] > K
    assert len(unfinished) == 5


@pytest.mark.parametrize("error", [Interrupted, LearnerLost])
def test_an_evaluation_after_which_the_run_continues_leaves_nothing_in_the_engine(engine, monkeypatch, error):
    poll, polls = engine.poll, []

    def poll_or_fail(**options):
        polls.append(options)
        if len(polls) == 2:
            raise error
        return poll(**options)

    monkeypatch.setattr(engine, "poll", poll_or_fail)
    with pytest.raises(error):
        run(engine)
    assert not engine.active and not engine.waiting


def test_each_step_draws_its_own_random_numbers(engine):
    first, again, later = (run(engine, step=step) for step in (0, 0, 1))
    tokens = [[sample.rollout.tokens.tolist() for sample in report.samples] for report in (first, again, later)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert not {s.rollout.serial for s in first.samples} & {s.rollout.serial for s in later.samples}


def test_the_metrics_agree_with_enumeration(engine):
    report = run(engine, count=8)
    groups = by_problem(report).values()
    right = [[sample.score.acc for sample in group] for group in groups]
    assert 0.05 < np.mean(right) < 0.95, "the test needs right and wrong answers"
    metrics = report.metrics
    assert metrics[f"avg@{K}"] == pytest.approx(np.mean(right))
    for j in (1, 2, 4, 6):
        chance = np.mean([np.mean([any(subset) for subset in combinations(row, j)]) for row in right])
        assert metrics[f"pass@{j}"] == pytest.approx(chance)
    majorities = []
    for group in groups:
        votes = Counter(sample.score.extras["extracted"] for sample in group)
        del votes[None]
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        majorities.append(winners.count("1") / len(winners) if winners else 0.0)
    assert metrics[f"maj@{K}"] == pytest.approx(np.mean(majorities))
    parsed = [sample.score.extras["extracted"] is not None for sample in report.samples]
    assert metrics["parse_rate"] == pytest.approx(np.mean(parsed))
    assert metrics["reward/mean"] == pytest.approx(np.mean([sample.score.value for sample in report.samples]))
    assert metrics["response_length/mean"] == pytest.approx(np.mean([len(s.rollout) for s in report.samples]))
    cut_off = [sample.rollout.finish_reason == "length" for sample in report.samples]
    assert metrics["response_length/clip_ratio"] == pytest.approx(np.mean(cut_off))
    assert (metrics["problems"], metrics["unjudged"], metrics["problems/unjudged"]) == (8, 0, 0)


def test_every_mean_lies_in_its_interval_and_only_counts_have_no_interval(engine):
    metrics = run(engine, count=8).metrics
    without_interval = {
        name for name in metrics if not name.endswith(("/low", "/high")) and f"{name}/low" not in metrics
    }
    assert without_interval == {"problems", "problems/unjudged", "unjudged"}
    assert [name for name in metrics if not name.endswith(("/low", "/high"))] == metric_names(K)
    for name in metrics.keys() - without_interval:
        if not name.endswith(("/low", "/high")):
            assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"], name
    assert metrics["reward/mean/low"] < metrics["reward/mean/high"]


def test_unjudged_samples_and_unjudged_problems_are_left_out_of_the_means(engine):
    report = run(engine, sometimes, count=8)
    metrics = report.metrics
    # Problems 1 and 5 have no judged sample; in the others every second sample is judged.
    assert (metrics["unjudged"], metrics["problems/unjudged"], metrics["problems"]) == (2 * 6 + 6 * 3, 2, 8)
    rows = [[s.score.acc for s in group if s.score.judged] for group in by_problem(report).values()]
    means = [np.mean(row) for row in rows if row]
    assert len(means) == 6
    assert metrics[f"avg@{K}"] == pytest.approx(np.mean(means))
    assert metrics[f"pass@{K}"] == pytest.approx(np.mean([any(row) for row in rows if row]))
    lengths = [len(sample.rollout) for sample in report.samples]
    assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))  # unjudged samples count here


def test_a_judge_that_returns_only_a_number_gives_no_accuracy_and_no_majority(engine):
    metrics = run(engine, lambda rollout: Score(0.5)).metrics
    assert metrics["reward/mean"] == 0.5
    assert not [name for name in metrics if "@" in name or name.startswith("parse")]
    metrics = run(engine, lambda rollout: Score(1.0, acc=True)).metrics
    assert metrics[f"pass@{K}"] == 1.0
    assert f"maj@{K}" not in metrics


def test_without_any_judged_sample_the_reward_is_nan(engine):
    metrics = run(engine, lambda rollout: Score(None, error="no")).metrics
    assert math.isnan(metrics["reward/mean"])
    assert "reward/mean/low" not in metrics
    assert metrics["unjudged"] == 30


def test_a_question_that_appears_twice_is_one_problem():
    def sample(acc):
        return EvalSample(make.prompt(), make.rollout([1]), Score(float(acc), acc=acc))

    metrics = metrics_by_problem([sample(acc) for acc in (True, False, False, False)], k=2)
    assert metrics["avg@2"] == {"uid": 0.25}
    assert metrics["pass@2"] == {"uid": 0.5}


def test_a_share_counts_in_the_mean_and_only_a_whole_one_solves_a_problem():
    samples = [EvalSample(make.prompt(), make.rollout([1]), Score(acc, acc=acc)) for acc in (0.5, 0.75, 0.0, True)]
    metrics = {name: next(iter(values.values())) for name, values in metrics_by_problem(samples, 4).items()}
    assert metrics["avg@4"] == pytest.approx(2.25 / 4)
    assert (metrics["pass@1"], metrics["pass@4"]) == (0.25, 1.0)
