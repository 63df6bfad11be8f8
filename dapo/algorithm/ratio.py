"""The importance ratio, its clips and k3: formulas that take torch tensors or numpy arrays, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    Array = TypeVar("Array", Tensor, np.ndarray)

MAX_LOG_RATIO = 20.0  # bounds exp() in the ratio and in k3


@dataclass(frozen=True, slots=True)
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float | None = 10.0
    kl_coef: float = 0.0


def importance_ratio(logprobs_T: Array, old_logprobs_T: Array) -> Array:
    """Return exp(logp_new - logp_old) per token."""
    return bounded_exp(logprobs_T - old_logprobs_T)


def bounded_exp(log_ratios_T: Array) -> Array:
    """Return the exponential, with its argument bounded so that it cannot overflow."""
    return _exp(log_ratios_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def surrogates(ratio_T: Array, advantages_T: Array, config: LossConfig) -> tuple[Array, Array]:
    """Return -A r and -A clip(r, 1 - clip_low, 1 + clip_high). Without the dual clip, the larger one is the loss."""
    return -advantages_T * ratio_T, -advantages_T * ratio_T.clip(1 - config.clip_low, 1 + config.clip_high)


def clip_marks(unclipped_T: Array, clipped_T: Array, advantages_T: Array, config: LossConfig) -> dict[str, Array]:
    """Return whether each clip bounds the loss of each token, given its surrogates: `high`, `low` and `dual`.

    With a positive advantage only the upper clip can act, with a negative one the lower or the dual clip.
    """
    is_clipped_T = clipped_T > unclipped_T
    marks = {"high": is_clipped_T & (advantages_T > 0), "low": is_clipped_T & (advantages_T < 0)}
    if config.clip_c is not None:
        bound_T = -config.clip_c * advantages_T
        marks["dual"] = (advantages_T < 0) & ((unclipped_T > bound_T) | (clipped_T > bound_T))
    return marks


def kl_k3(logprobs_T: Array, ref_logprobs_T: Array) -> Array:
    """Return the k3 estimate of KL(policy || reference) per token: exp(ref - new) - (ref - new) - 1, never negative."""
    delta_T = (ref_logprobs_T - logprobs_T).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _exp(delta_T) - delta_T - 1


def _exp(values_T: Any) -> Any:
    return np.exp(values_T) if isinstance(values_T, np.ndarray) else values_T.exp()
