"""Functions of the user in the place of built-in ones: each result is checked, and a wrong one is named in a sentence.

`str(function)` is the name that messages use. Loss, advantage, shaping and schedule are tried once when they are
wrapped, so that most mistakes show before a model is loaded.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.algorithm.advantage import Advantage
from dapo.algorithm.filtering import GroupFilter
from dapo.algorithm.loss import Loss, Metrics
from dapo.algorithm.overlong import LengthShaping
from dapo.algorithm.ratio import LossConfig
from dapo.algorithm.schedule import Schedule
from dapo.errors import PartError
from dapo.types import FLAT, Group, Verdict

Function = Callable[..., Any]

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")
_UNRELATED = "returned a loss that does not depend on the log-probabilities"
_OUR_VERDICTS = {verdict.value for verdict in Verdict} - {*FLAT, Verdict.KEPT}


def checked_advantage(function: Function, group_size: int) -> Advantage:
    def advantage(rewards_G: np.ndarray) -> np.ndarray:
        found = function(rewards_G.copy())
        try:
            advantages_G = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one: a tensor with a gradient
            raise PartError(f"{function} returned {_kind(found)}; expected one number per reward") from None
        if advantages_G.shape != rewards_G.shape:
            shape = list(advantages_G.shape)
            raise PartError(f"{function} returned shape {shape} for {len(rewards_G)} rewards; expected one number each")
        if not np.isfinite(advantages_G).all():
            raise PartError(f"{function} returned {advantages_G.tolist()} for the rewards {rewards_G.tolist()}")
        return advantages_G

    advantage(np.arange(group_size) % 2.0)
    return advantage


def checked_shaping(function: Function, max_length: int) -> LengthShaping:
    def shaping(reward: float, length: int, max_length: int, is_cut_off: bool) -> float:
        found = function(reward, length, max_length, is_cut_off)
        return _number(function, found, f"a response of {length} tokens with reward {reward}")

    for length, is_cut_off in ((1, False), (max_length, True)):
        shaping(1.0, length, max_length, is_cut_off)
    return shaping


def checked_schedule(function: Function, total_steps: int) -> Schedule:
    def schedule(step: int, total: int) -> float:
        factor = _number(function, function(step, total), f"step {step} of {total}")
        if factor < 0:
            raise PartError(f"{function} returned {factor} for step {step} of {total}; expected a factor of at least 0")
        return factor

    if total_steps > 0:
        schedule(0, total_steps)
        schedule(total_steps - 1, total_steps)
    return schedule


def checked_filter(function: Function) -> GroupFilter:
    def group_filter(group: Group) -> str:
        verdict = function(group)
        if not isinstance(verdict, str):
            raise PartError(f"{function} returned {_kind(verdict)}; expected 'kept', or the reason as a string")
        if not _REASON.fullmatch(verdict) or verdict in _OUR_VERDICTS:
            raise PartError(
                f"{function} returned {verdict[:60]!r}; expected 'kept', or a reason of at most 40 lowercase letters, "
                f"digits and underscores other than {', '.join(sorted(_OUR_VERDICTS))}"
            )
        return str(verdict)

    return group_filter


def checked_loss(function: Function, config: LossConfig) -> Loss:
    """Return a loss that is computed over whole responses. Its metrics get the prefix `loss/`."""
    names: list[str] | None = None  # of the metrics; ranks that share an update must add up the same ones

    def loss(
        logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses_T: Tensor, config: LossConfig
    ) -> tuple[Tensor, Metrics]:
        nonlocal names
        arguments = logprobs_T, old_logprobs_T, advantages_T
        # Copies, because some of the tensors share memory with those of the batch, or with `logprobs_T`.
        constants = old_logprobs_T.clone(), advantages_T.clone(), responses_T.clone()
        loss_T, metrics = _split(function, function(logprobs_T, *constants, config))
        for name, values in {"the loss": loss_T, **metrics}.items():
            if not isinstance(values, Tensor) or values.shape != logprobs_T.shape:
                found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else _kind(values)
                expected = f"one value per token, shape {list(logprobs_T.shape)}"
                raise PartError(f"{function} returned {name} as {found}; expected {expected}")
        if not loss_T.requires_grad:
            raise PartError(f"{function} {_UNRELATED}")
        if not loss_T.isfinite().all() and all(each.isfinite().all() for each in arguments):
            raise PartError(f"{function} returned a loss that is not finite for finite arguments")
        found, names = sorted(metrics), sorted(metrics) if names is None else names
        if found != names:
            raise PartError(f"{function} returned metrics {found}, but {names} in another call; return the same ones")
        return loss_T, {f"loss/{name}": values.detach().float() for name, values in metrics.items()}

    old_T = torch.tensor([-1.0, -0.5, -2.0, -1.0, -3.0])
    advantages_T, responses_T = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]), torch.tensor([1, 1, 2, 2, 2])
    new_T = (old_T + 0.1).requires_grad_()
    loss_T, _ = loss(new_T, old_T, advantages_T, responses_T, config)
    try:
        (grad_T,) = torch.autograd.grad(loss_T.sum(), new_T, allow_unused=True)
    except RuntimeError as error:  # complex numbers, or `backward` was called
        raise PartError(f"{function} returned a loss that has no gradient: {' '.join(str(error).split())}") from error
    if grad_T is None:  # it was put into a new tensor
        raise PartError(f"{function} {_UNRELATED}")
    return Loss(loss, per_token=False)


def _split(function: Function, found: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the metrics of a result that has both, or only the loss."""
    if not isinstance(found, tuple):
        return found, {}
    if len(found) != 2 or not isinstance(found[1], dict):
        raise PartError(f"{function} returned a tuple; expected the loss, or the loss and a dictionary of metrics")
    if unnamed := [name for name in found[1] if not isinstance(name, str)]:
        raise PartError(f"{function} returned a metric named {unnamed[0]!r}; expected names that are text")
    return found


def _number(function: Function, found: Any, what: str) -> float:
    value = found.item() if getattr(found, "ndim", None) == 0 else found
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        shown = value if isinstance(value, float) else _kind(value)
        raise PartError(f"{function} returned {shown} for {what}; expected a finite number")
    return number


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
