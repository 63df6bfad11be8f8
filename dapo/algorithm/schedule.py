"""The learning rate over a run: warm-up, then a schedule from (step, total steps) to a factor."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int, int], float]  # step counts from 0, the first one after the warm-up, to total - 1


def constant(step: int, total: int) -> float:
    return 1.0


def linear(step: int, total: int) -> float:
    """Fall from 1 by equal amounts, to reach 0 with the step after the last."""
    return 1 - step / total


def cosine(step: int, total: int) -> float:
    """Fall from 1 along half a cosine, to reach 0 with the step after the last."""
    return (1 + math.cos(math.pi * step / total)) / 2


SCHEDULES: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, schedule: Schedule) -> float:
    """Return the factor for this trainer step, which counts from 1: step / warmup_steps, and then the schedule's."""
    if step <= warmup_steps and warmup_steps > 0:
        return step / warmup_steps
    return schedule(step - warmup_steps - 1, total_steps - warmup_steps)
