"""Weights that correct for a sampler that differs from the trainer: another program, or older weights."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from dapo.algorithm.loss import Metrics, response_sum
from dapo.algorithm.ratio import bounded_exp

Correction = Literal["none", "token-truncated", "token-masked", "sequence-truncated", "sequence-masked"]

LIMIT = 2.0  # largest weight


def correction_weights(
    start_logprobs_T: Tensor, old_logprobs_T: Tensor, responses_T: Tensor, correction: Correction
) -> tuple[Tensor, Metrics]:
    """Return the weight of each token's loss, exp(start - old), and metrics per token.

    `start_logprobs_T` are the trainer's, before the first update of the step. The weight is that of the token or, on
    the sequence level, the product over its response. Truncated weights are at most LIMIT. Masked weights outside
    [1 / LIMIT, LIMIT] are set to 0.
    """
    level, _, how = correction.partition("-")
    log_ratio_T = start_logprobs_T - old_logprobs_T
    ratio_T = bounded_exp(log_ratio_T if level == "token" else response_sum(log_ratio_T, responses_T))
    is_outside_T = ratio_T > LIMIT
    if how == "masked":
        is_outside_T = is_outside_T | (ratio_T < 1 / LIMIT)
    weights_T = ratio_T.masked_fill(is_outside_T, LIMIT if how == "truncated" else 0.0)
    return weights_T, {"correction/weight": weights_T, f"correction/{how}": is_outside_T.float()}
