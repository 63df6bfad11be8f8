"""Evaluation through the same engine and rewards as training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dapo.engine.protocol import Engine
from dapo.types import EvalReport, EvalSample, Prompt, Request, Rollout, SamplingParams, Score


def evaluate(
    engine: Engine,
    judge: Callable[[Prompt, Rollout], Score],
    prompts: Sequence[Prompt],
    k: int,
    params: SamplingParams,
    step: int,
    name: str,
) -> EvalReport:
    """k samples for each prompt. The serials follow from the step, so that every evaluation draws fresh numbers."""
    by_serial = dict(enumerate(prompts, start=step * len(prompts)))
    engine.submit([Request(serial, prompt.tokens, k, params, "eval") for serial, prompt in by_serial.items()])
    samples = []
    while rollouts := engine.poll():
        for rollout in rollouts:
            prompt = by_serial[rollout.serial]
            samples.append(EvalSample(prompt, rollout, judge(prompt, rollout)))
    samples.sort(key=lambda sample: (sample.rollout.serial, sample.rollout.index))
    return EvalReport(step, name, _metrics(samples, k), tuple(samples))


def _metrics(samples: Sequence[EvalSample], k: int) -> dict[str, float]:
    judged = [sample for sample in samples if sample.score.judged]
    metrics = {
        "reward/mean": _mean([sample.score.value for sample in judged]),
        "response_length/mean": _mean([len(sample.rollout) for sample in samples]),
        "response_length/clip_ratio": _mean([sample.rollout.finish_reason == "length" for sample in samples]),
        "unjudged": float(len(samples) - len(judged)),
    }
    if judged and all(sample.score.acc is not None for sample in judged):
        metrics[f"avg@{k}"] = _mean([sample.score.acc for sample in judged])
    return metrics


def _mean(values: Sequence[float | bool | None]) -> float:
    return float(np.mean(np.array(values, dtype=np.float64))) if values else float("nan")
