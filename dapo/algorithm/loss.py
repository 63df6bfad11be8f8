"""The token-level policy loss: clip-higher, dual clip, optional KL term, and the token weights for aggregation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dapo.algorithm.ratio import LossConfig, clip_marks, importance_ratio, kl_k3, surrogates

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def policy_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, ref_logprobs_T: Tensor | None, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and detached per-token metrics: the ratio, which clip applied, the KL.

    With r = exp(logp_new - logp_old): loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for A < 0 at most
    -clip_c A. `old_logprobs_T` are those recorded by the sampler.
    """
    ratio_T = importance_ratio(logprobs_T, old_logprobs_T)
    unclipped_T, clipped_T = surrogates(ratio_T, advantages_T, config)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    marks = clip_marks(unclipped_T, clipped_T, advantages_T, config)
    if config.clip_c is not None:
        loss_T = torch.where(marks["dual"], -config.clip_c * advantages_T, loss_T)
    metrics = {"ratio": ratio_T.detach(), **{f"clip_fraction/{name}": mark.float() for name, mark in marks.items()}}
    if ref_logprobs_T is not None:
        kl_T = kl_k3(logprobs_T, ref_logprobs_T)
        loss_T = loss_T + config.kl_coef * kl_T
        metrics["kl"] = kl_T.detach()
    return loss_T, metrics


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
