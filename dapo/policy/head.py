"""From hidden states to loss and back in chunks: the [tokens x vocabulary] logits of a whole batch never exist.

The loss of a token depends on its own log-probability alone, so its gradient is known as soon as the chunk's logits
are: forward and backward of the head happen in one pass, and the logits are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.model.forward import wide_product

CHUNK_TOKENS = 256

# (log-probabilities of a chunk, the chunk's slice of the batch) -> (weighted loss, to be summed; figures per token)
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, eq=False)
class HeadResult:
    loss: Tensor
    logprobs_R: Tensor
    entropy_R: Tensor
    metrics: dict[str, Tensor]  # per token
    grad_hidden_R: Tensor  # of the loss with respect to the hidden states


def fused_head_loss(
    hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float, loss: ChunkLoss, weight_grad: Tensor | None
) -> HeadResult:
    """Adds the gradient of the head's weight to `weight_grad`, where given, and returns that of the hidden states."""
    grad_hidden_R = torch.empty_like(hidden_R)
    parts: list[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]] = []
    hidden_R = hidden_R.detach()
    for start in range(0, len(hidden_R), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        hidden, targets = hidden_R[chunk], targets_R[chunk, None]
        with torch.no_grad():
            logits, normaliser, logprobs = _chunk_logprobs(hidden, weight, targets, temperature)
            # From here on the memory of the logits becomes that of the probabilities, then of their gradient.
            logits.sub_(normaliser)
            probabilities = logits.exp()
            entropy = -(probabilities * logits).sum(-1)
            del logits
        logprobs.requires_grad_()
        with torch.enable_grad():
            total, metrics = loss(logprobs, chunk)
            (grad_logprobs,) = torch.autograd.grad(total, logprobs)
        with torch.no_grad():
            grad = grad_logprobs[:, None] / temperature
            grad_logits = probabilities.mul_(-grad).scatter_add_(1, targets, grad).to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden_R[chunk])
            if weight_grad is not None:
                _accumulate(weight_grad, grad_logits, hidden)
        parts.append((total.detach(), logprobs.detach(), entropy, metrics))
    return HeadResult(
        loss=torch.stack([part[0] for part in parts]).sum(),
        logprobs_R=torch.cat([part[1] for part in parts]),
        entropy_R=torch.cat([part[2] for part in parts]),
        metrics={name: torch.cat([part[3][name] for part in parts]) for name in parts[0][3]},
        grad_hidden_R=grad_hidden_R,
    )


@torch.no_grad()
def chunked_logprobs(hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    parts = []
    for start in range(0, len(hidden_R), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        parts.append(_chunk_logprobs(hidden_R[chunk], weight, targets_R[chunk, None], temperature)[2])
    return torch.cat(parts)


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = wide_product(hidden, weight.t())
    if temperature != 1:
        logits.div_(temperature)
    normaliser = logits.logsumexp(-1, keepdim=True)
    return logits, normaliser, (logits.gather(1, targets) - normaliser)[:, 0]


def _accumulate(weight_grad: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Over chunks and micro-batches in the precision of `weight_grad`: bf16 sums would lose the small terms."""
    if weight_grad.dtype == hidden.dtype:
        weight_grad.addmm_(grad_logits.t(), hidden)
    else:
        weight_grad.add_(wide_product(grad_logits.t(), hidden))
