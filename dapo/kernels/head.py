"""The loss head over a chunk of float32 logits: log-probabilities and entropies, and the gradient of the logits.

The distribution is the one that was sampled from: softmax(logits / temperature). Nothing is recorded for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel_where


def _is_float32_on_cuda(logits_CV: Tensor, *_: object, **__: object) -> bool:
    return logits_CV.is_cuda and logits_CV.dtype == torch.float32


@kernel_where(_is_float32_on_cuda)
def logprobs_and_entropy(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row the target's log-probability, the entropy, and the log of the softmax's denominator."""
    scaled_CV = logits_CV / temperature
    normalizer_C = scaled_CV.logsumexp(-1)
    logprobs_CV = scaled_CV.log_softmax(-1)
    # entr(0) is 0, where p * log(p) would be NaN.
    entropy_C = torch.special.entr(logprobs_CV.exp()).sum(-1)
    return logprobs_CV.gather(1, targets_C[:, None])[:, 0], entropy_C, normalizer_C


@kernel_where(_is_float32_on_cuda)
def logits_gradient(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor,
    temperature: float,
    out_CV: Tensor,
) -> None:
    """Write the gradient of sum(grad_logprobs * logprobs), rounded once. `out_CV` may be the logits' own memory."""
    # d logprob[target] / d logits = (onehot(target) - softmax) / temperature
    scale_C1 = grad_logprobs_C[:, None] / temperature
    minus_softmax_CV = -torch.exp(logits_CV / temperature - normalizer_C[:, None])
    # 1 is added before scaling, so that a target near certainty keeps its small 1 - p.
    minus_softmax_CV.scatter_add_(1, targets_C[:, None], torch.ones_like(scale_C1))
    out_CV.copy_(scale_C1 * minus_softmax_CV)
