"""The token-level policy loss: clip-higher, dual clip, optional KL term, and the token weights for aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # bounds exp() in the ratio and in k3

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float | None = 10.0
    kl_coef: float = 0.0


def policy_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, ref_logprobs_T: Tensor | None, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and detached per-token metrics: the ratio, which clip applied, the KL.

    With r = exp(logp_new - logp_old): loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for A < 0 at most
    -clip_c A. `old_logprobs_T` are those recorded by the sampler.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    is_clipped_T = clipped_T > unclipped_T
    metrics = {
        "ratio": ratio_T.detach(),
        "clip_fraction/high": (is_clipped_T & (advantages_T > 0)).float(),
        "clip_fraction/low": (is_clipped_T & (advantages_T < 0)).float(),
    }
    if config.clip_c is not None:  # dual clip
        bound_T = -config.clip_c * advantages_T
        is_dual_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_dual_T, bound_T, loss_T)
        metrics["clip_fraction/dual"] = is_dual_T.float()
    if ref_logprobs_T is not None:
        kl_T = kl_k3(logprobs_T, ref_logprobs_T)
        loss_T = loss_T + config.kl_coef * kl_T
        metrics["kl"] = kl_T.detach()
    return loss_T, metrics


def kl_k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) per token: exp(ref - new) - (ref - new) - 1, never negative."""
    delta_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return delta_T.exp() - delta_T - 1


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
