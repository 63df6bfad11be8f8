"""Evaluation with the engine and judge of training: k samples per question, and the metrics over them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from dapo.algorithm.estimators import DIFFERENCE_OF_RATES, RATE, estimate, ks, majority, paired_difference, pass_at_k
from dapo.config import Config
from dapo.engine.protocol import Engine
from dapo.errors import LearnerLost
from dapo.rewards.protocol import Judge
from dapo.rewards.thought import with_reply_start
from dapo.sampling.episodes import Environment, Episodes
from dapo.system.progress import wait_visibly
from dapo.terminal.evaltable import DifferenceRow, headline, is_rate
from dapo.types import EvalReport, EvalSample, Prompt, Rollout, SamplingParams, Score

COUNTS = ("problems", "problems/unjudged", "unjudged")  # metrics without an interval
MetricsByProblem = dict[str, dict[str, float]]  # metric -> problem uid -> value


def sampling_params(config: Config) -> SamplingParams:
    """Return how evaluations sample."""
    options = config.eval
    limit, stop = config.data.max_response_length, config.rollout.stop
    return SamplingParams(options.temperature, options.top_p, options.top_k, limit, stop)


class Interrupted(Exception):
    """The user asked to stop during an evaluation."""


def evaluate(
    engine: Engine,
    judge: Judge,
    prompts: Sequence[Prompt],
    k: int,
    params: SamplingParams,
    step: int,
    name: str,
    on_sample: Callable[[int, int], None] = lambda done, total: None,
    think_tags: Sequence[str] | None = None,
    environment: Environment | None = None,
    on_wait: Callable[[str], None] = lambda message: None,
) -> EvalReport:
    """Sample k responses to each prompt, and judge each group while the engine samples the others.

    Serials are numbered from the step, so that every evaluation of a run draws fresh random numbers. `on_sample` may
    raise Interrupted, which leaves the engine idle. So does a lost learner: the run continues from a checkpoint.
    """
    by_serial = dict(enumerate(prompts, start=step * len(prompts)))
    episodes = Episodes(engine, judge, environment, on_wait)
    episodes.submit(by_serial, k, params, "eval")
    finished: dict[int, list[Rollout]] = defaultdict(list)
    scores: dict[int, Future[list[Score]]] = {}
    done = 0
    try:
        while rollouts := episodes.poll():
            for rollout in rollouts:
                members = finished[rollout.serial]
                members.append(rollout)
                if len(members) == k:
                    members.sort(key=lambda member: member.index)
                    scores[rollout.serial] = episodes.score(by_serial[rollout.serial], members)
            done += len(rollouts)
            on_sample(done, k * len(prompts))
    except (Interrupted, LearnerLost):
        episodes.cancel(by_serial)
        raise
    assert scores.keys() == by_serial.keys(), "the engine lost samples"
    samples: list[EvalSample] = []
    wait_visibly([*scores.values()], on_wait, lambda: "rewards")
    for serial in sorted(scores):
        prompt, members = by_serial[serial], finished[serial]
        marked = with_reply_start(prompt, members, scores[serial].result(), think_tags)
        samples += [EvalSample(prompt, *pair) for pair in zip(members, marked, strict=True)]
    return EvalReport(step, name, _metrics(samples, k), tuple(samples))


def metrics_by_problem(samples: Iterable[EvalSample], k: int) -> MetricsByProblem:
    """Return every metric for each problem. A model's metric is the mean over problems; models are paired by problem.

    Unjudged samples are left out, and so are problems without a judged sample. Lengths count all samples.
    """
    problems: dict[str, list[EvalSample]] = defaultdict(list)
    for sample in samples:
        problems[sample.prompt.uid].append(sample)
    judged = {uid: scores for uid, members in problems.items() if (scores := _judged(members))}
    scores = [score for members in judged.values() for score in members]
    metrics: MetricsByProblem = {
        "reward/mean": {uid: _mean(s.value for s in members) for uid, members in judged.items()}
    }
    has_acc = bool(scores) and all(score.acc is not None for score in scores)
    has_answers = any("extracted" in score.extras for score in scores)
    if has_acc:
        metrics[f"avg@{k}"] = {uid: _mean(s.acc for s in members) for uid, members in judged.items()}
        for j in ks(k):
            metrics[f"pass@{j}"] = {
                uid: pass_at_k(len(members), sum(s.acc == 1 for s in members), j) for uid, members in judged.items()
            }
    if has_acc and has_answers:
        metrics[f"maj@{k}"] = {
            uid: majority([_answer(s) for s in members], [s.acc == 1 for s in members])
            for uid, members in judged.items()
        }
    if has_answers:
        metrics["parse_rate"] = {uid: _mean(_answer(s) is not None for s in members) for uid, members in judged.items()}
    metrics["response_length/mean"] = {
        uid: _mean(sample.rollout.sampled for sample in members) for uid, members in problems.items()
    }
    metrics["response_length/clip_ratio"] = {
        uid: _mean(sample.rollout.finish_reason == "length" for sample in members) for uid, members in problems.items()
    }
    return metrics


def metric_names(k: int) -> list[str]:
    """Return the metrics of an evaluation whose judge returns accuracies and answers, without their intervals."""
    passes = [f"pass@{j}" for j in ks(k)]
    lengths = ["response_length/mean", "response_length/clip_ratio"]
    return ["reward/mean", f"avg@{k}", *passes, f"maj@{k}", "parse_rate", *lengths, *COUNTS]


def differences(before: EvalReport, after: EvalReport, label: str = "after") -> list[DifferenceRow]:
    """Return the paired differences of the main metrics, problem by problem: `after` minus `before`.

    There are none if a resume has changed the number of samples per problem.
    """
    k, others = (max(Counter(sample.prompt.uid for sample in r.samples).values()) for r in (before, after))
    if k != others:
        return []
    old, new = (metrics_by_problem(report.samples, k) for report in (before, after))
    names = headline(before.metrics)
    return [
        DifferenceRow(
            label,
            name,
            *paired_difference(old[name], new.get(name, {}), DIFFERENCE_OF_RATES if is_rate(name) else None),
        )
        for name in names
    ]


def _metrics(samples: Sequence[EvalSample], k: int) -> dict[str, float]:
    """Return the means over problems, with their 95% intervals if there are enough problems."""
    metrics: dict[str, float] = {}
    by_problem = metrics_by_problem(samples, k)
    for name, values in by_problem.items():
        mean, low, high = estimate(list(values.values()), RATE if is_rate(name) else None)
        metrics[name] = mean
        if not math.isnan(low):
            metrics |= {f"{name}/low": low, f"{name}/high": high}
    problems = len(by_problem["response_length/mean"])
    unjudged = sum(not sample.score.judged for sample in samples)
    counts = problems, problems - len(by_problem["reward/mean"]), unjudged
    return metrics | dict(zip(COUNTS, map(float, counts), strict=True))


def _judged(samples: Iterable[EvalSample]) -> list[Score]:
    return [sample.score for sample in samples if sample.score.judged]


def _answer(score: Score) -> str | None:
    extracted = score.extras.get("extracted")
    return None if extracted is None else str(extracted)


def _mean(values: Iterable[float | bool | None]) -> float:
    return float(np.mean(np.array(list(values), dtype=np.float64)))
