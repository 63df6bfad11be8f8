"""The policy losses, one pure function each, the optional KL term, and the token weights for aggregation.

A loss takes the tokens of some responses, packed one response after the other, and returns the loss of each token and
metrics per token:

    loss(logprobs_T, old_logprobs_T, advantages_T, responses_T, config) -> (loss_T, metrics)

`responses_T` is the number of each token's response. `old_logprobs_T` are those recorded by the sampler. The equations
and papers are in docs/explanation/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dapo.algorithm.ratio import LossConfig, bounded_exp, clip_marks, importance_ratio, kl_k3, surrogates

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Metrics = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor, LossConfig], tuple[Tensor, Metrics]]


def dapo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses_T: Tensor, config: LossConfig
) -> tuple[Tensor, Metrics]:
    """Clip the ratio of each token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -clip_c A."""
    return _clipped(importance_ratio(logprobs_T, old_logprobs_T), advantages_T, config)


def gspo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses_T: Tensor, config: LossConfig
) -> tuple[Tensor, Metrics]:
    """Clip the ratio of each response, the geometric mean of its tokens' ratios, as `dapo_loss` clips a token's."""
    return _clipped(bounded_exp(response_mean(logprobs_T - old_logprobs_T, responses_T)), advantages_T, config)


def gmpo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses_T: Tensor, config: LossConfig
) -> tuple[Tensor, Metrics]:
    """Clip the log-ratio of each token, and take their geometric mean over the response: -A exp(mean of log r)."""
    log_ratio_T = logprobs_T - old_logprobs_T
    # Only the side on which the token has already moved with its advantage is clipped, as by the max of `dapo_loss`.
    is_high_T = (advantages_T > 0) & (log_ratio_T > config.clip_high)
    is_low_T = (advantages_T < 0) & (log_ratio_T < -config.clip_low)
    bounded_T = torch.where(
        advantages_T > 0, log_ratio_T.clamp(max=config.clip_high), log_ratio_T.clamp(min=-config.clip_low)
    )
    ratio_T = bounded_exp(response_mean(bounded_T, responses_T))
    marks = {"clip_fraction/high": is_high_T.float(), "clip_fraction/low": is_low_T.float()}
    return -advantages_T * ratio_T, {"ratio": ratio_T.detach(), **marks}


def cispo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, responses_T: Tensor, config: LossConfig
) -> tuple[Tensor, Metrics]:
    """Weight the policy gradient of each token by its clipped ratio: -sg(clip(r, 1 - low, 1 + high)) A log p."""
    ratio_T = importance_ratio(logprobs_T, old_logprobs_T).detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    marks = {"clip_fraction/high": (ratio_T > high).float(), "clip_fraction/low": (ratio_T < low).float()}
    return -ratio_T.clamp(low, high) * advantages_T * logprobs_T, {"ratio": ratio_T, **marks}


def sapo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    responses_T: Tensor,
    config: LossConfig,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """Replace the clip by a smooth gate: -A (4 / tau) sigmoid(tau (r - 1)), with tau by the sign of the advantage."""
    ratio_T = importance_ratio(logprobs_T, old_logprobs_T)
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    return -advantages_T * torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T, {"ratio": ratio_T.detach()}


class Loss(NamedTuple):
    function: TokenLoss
    per_token: bool  # the loss of a token depends on its own log-probability only


# By the names of `algorithm.loss`. GRPO and Dr. GRPO are `dapo_loss` with other options.
LOSSES = {
    "dapo": Loss(dapo_loss, per_token=True),
    "grpo": Loss(dapo_loss, per_token=True),
    "dr_grpo": Loss(dapo_loss, per_token=True),
    "gspo": Loss(gspo_loss, per_token=False),
    "cispo": Loss(cispo_loss, per_token=True),
    "sapo": Loss(sapo_loss, per_token=True),
    "gmpo": Loss(gmpo_loss, per_token=False),
}


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    ref_logprobs_T: Tensor | None,
    config: LossConfig,
    responses_T: Tensor | None = None,
    loss: TokenLoss = dapo_loss,
    weights_T: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the loss of each token with the KL term, and detached per-token metrics: ratio, clips, KL.

    Without `responses_T` all tokens belong to one response. `weights_T` multiplies the loss, but not the KL term.
    """
    if responses_T is None:
        responses_T = torch.ones_like(logprobs_T, dtype=torch.long)
    loss_T, metrics = loss(logprobs_T, old_logprobs_T, advantages_T, responses_T, config)
    if weights_T is not None:
        loss_T = loss_T * weights_T
    if ref_logprobs_T is not None:
        kl_T = kl_k3(logprobs_T, ref_logprobs_T)
        loss_T = loss_T + config.kl_coef * kl_T
        metrics = {**metrics, "kl": kl_T.detach()}
    return loss_T, metrics


def response_mean(values_T: Tensor, responses_T: Tensor) -> Tensor:
    """Return, for each token, the mean of the values over its response."""
    return response_sum(values_T, responses_T) / response_sum(torch.ones_like(values_T), responses_T)


def response_sum(values_T: Tensor, responses_T: Tensor) -> Tensor:
    """Return, for each token, the sum of the values over its response, taken in float64."""
    # No number of a response exceeds the number of tokens, so the size is known without reading the tensor.
    sums = torch.zeros(len(values_T) + 1, dtype=torch.float64, device=values_T.device)
    sums = sums.index_add(0, responses_T, values_T.double())
    return sums.index_select(0, responses_T).to(values_T.dtype)


def token_weight(mode: AggregationMode, length: int, total_tokens: int, total_sequences: int) -> float:
    """Return the weight of each token of a sequence of `length` tokens; the aggregate is the sum of weight x loss.

    The totals are those of the whole mini-batch over all ranks, counted before the first backward pass. So the gradient
    does not depend on how the mini-batch is split into micro-batches or among ranks.
    """
    if mode == "token-mean":
        return 1 / total_tokens
    if mode == "seq-mean-token-sum":
        return 1 / total_sequences
    return 1 / (total_sequences * length)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, config: LossConfig) -> tuple[Tensor, Metrics]:
    unclipped_T, clipped_T = surrogates(ratio_T, advantages_T, config)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    marks = clip_marks(unclipped_T, clipped_T, advantages_T, config)
    if config.clip_c is not None:
        loss_T = torch.where(marks["dual"], -config.clip_c * advantages_T, loss_T)
    return loss_T, {
        "ratio": ratio_T.detach(),
        **{f"clip_fraction/{name}": mark.float() for name, mark in marks.items()},
    }
