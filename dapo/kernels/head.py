"""The loss head over a chunk of float32 logits: log-probabilities and entropies, and the gradient of the logits.

Nothing is recorded for autograd. The distribution is that of sampling: softmax(logits / temperature).
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_and_entropy(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each row the target's log-probability, the entropy, and the log of the softmax's denominator."""
    function = logprobs_and_entropy_triton if _is_fast(logits_CV) else logprobs_and_entropy_torch
    return function(logits_CV, targets_C, temperature)


def logits_gradient(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    temperature: float,
    out_CV: Tensor,
) -> None:
    """Write the gradient of sum(grad_logprobs * logprobs), rounded once; `out_CV` may be the logits' own memory."""
    function = logits_gradient_triton if _is_fast(logits_CV) else logits_gradient_torch
    function(logits_CV, normalizer_C, targets_C, grad_logprobs_C, temperature, out_CV)


def _is_fast(logits_CV: Tensor) -> bool:
    return logits_CV.is_cuda and logits_CV.dtype == torch.float32


def logprobs_and_entropy_torch(
    logits_CV: Tensor, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    scaled_CV = logits_CV / temperature
    normalizer_C = scaled_CV.logsumexp(-1)
    logprobs_CV = scaled_CV.log_softmax(-1)
    # entr takes a probability of 0 for what it adds: nothing, not NaN.
    entropy_C = torch.special.entr(logprobs_CV.exp()).sum(-1)
    return logprobs_CV.gather(1, targets_C[:, None])[:, 0], entropy_C, normalizer_C


def logits_gradient_torch(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    temperature: float,
    out_CV: Tensor,
) -> None:
    scale_C1 = grad_logprobs_C[:, None] / temperature
    minus_softmax_CV = -torch.exp(logits_CV / temperature - normalizer_C[:, None])
    # The one is added before the scale: a target near certainty must not lose its small remainder.
    minus_softmax_CV.scatter_add_(1, targets_C[:, None], torch.ones_like(scale_C1))
    out_CV.copy_(scale_C1 * minus_softmax_CV)


def logprobs_and_entropy_triton(
    logits_CV: Tensor, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    from dapo.kernels._head_triton import statistics

    return statistics(logits_CV, targets_C, temperature)


def logits_gradient_triton(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    temperature: float,
    out_CV: Tensor,
) -> None:
    from dapo.kernels._head_triton import gradient

    gradient(logits_CV, normalizer_C, targets_C, grad_logprobs_C, temperature, out_CV)
