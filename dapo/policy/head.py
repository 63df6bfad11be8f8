"""The head's loss and gradient in chunks, so that the [tokens x vocabulary] logits of a whole batch never exist.

Where the loss of a token depends only on its own log-probability, its gradient is known as soon as the chunk's logits
are: forward and backward of the head are one pass, and the logits are computed once. A loss over whole responses needs
all log-probabilities first: `after_all_logprobs` computes them in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dapo.kernels.head import logits_gradient, logprobs_and_entropy
from dapo.model.products import add_weight_grad, input_grad, wide_product

CHUNK_TOKENS = 256
GPU_CHUNK_BYTES = 1 << 31  # of float32 logits, where memory allows; it takes larger chunks to keep a GPU busy

# (log-probabilities of a chunk, the chunk's slice of the batch) -> (weighted loss per token, metrics per token)
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]


def gather_predictors(hidden_T: Tensor, predictors_R: Tensor) -> Tensor:
    """Return the hidden state that predicts each response token.

    The first tokens of a group's responses share one. Its gradient is the sum of theirs, which is taken in float32:
    in bf16 every addition would round.
    """
    if hidden_T.dtype != torch.bfloat16:
        return hidden_T.index_select(0, predictors_R)
    return _GatherPredictors.apply(hidden_T, predictors_R)


class _GatherPredictors(Function):
    """`index_select` of bf16 whose backward sums in float32."""

    @staticmethod
    def forward(ctx: Any, hidden_T: Tensor, predictors_R: Tensor) -> Tensor:
        ctx.save_for_backward(predictors_R)
        ctx.tokens = len(hidden_T)
        return hidden_T.index_select(0, predictors_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (predictors_R,), grad_R = ctx.saved_tensors, grads[0]
        total = torch.zeros(ctx.tokens, grad_R.shape[1], device=grad_R.device)
        return total.index_add_(0, predictors_R, grad_R.float()).to(grad_R.dtype), None


@dataclass(frozen=True, slots=True, eq=False)
class HeadResult:
    loss: Tensor
    logprobs_R: Tensor
    entropy_R: Tensor
    metrics: dict[str, Tensor]  # per token


def fused_head_loss(
    hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float, loss: ChunkLoss,
    weight_grad: Tensor | None, chunk_bytes: int = GPU_CHUNK_BYTES,
) -> tuple[HeadResult, Tensor]:  # fmt: skip
    """Return the result and the gradient of the hidden states. Adds that of the head's weight to `weight_grad`."""
    grad_hidden_R = torch.empty_like(hidden_R)
    parts: list[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]] = []
    hidden_R = hidden_R.detach()
    for chunk in _chunks(hidden_R, weight, chunk_bytes):
        hidden, targets = hidden_R[chunk], targets_R[chunk]
        with torch.no_grad():
            distribution = _Distribution(wide_product(hidden, weight.t()), targets, temperature)
        logprobs = distribution.logprobs.requires_grad_()
        with torch.enable_grad():
            weighted, metrics = loss(logprobs, chunk)
            total = weighted.sum()
            (grad_logprobs,) = torch.autograd.grad(total, logprobs)
        with torch.no_grad():
            grad_logits = distribution.gradient(grad_logprobs, weight.dtype)
            grad_hidden_R[chunk] = input_grad(grad_logits, weight)
            if weight_grad is not None:
                add_weight_grad(weight_grad, grad_logits, hidden)
        parts.append((total.detach(), logprobs.detach(), distribution.entropy, metrics))
    result = HeadResult(
        loss=torch.stack([part[0] for part in parts]).sum(),
        logprobs_R=torch.cat([part[1] for part in parts]),
        entropy_R=torch.cat([part[2] for part in parts]),
        metrics={name: torch.cat([part[3][name] for part in parts]) for name in parts[0][3]},
    )
    return result, grad_hidden_R


def after_all_logprobs(
    hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float, loss: ChunkLoss,
    chunk_bytes: int = GPU_CHUNK_BYTES,
) -> ChunkLoss:  # fmt: skip
    """Return a loss that has the values and the gradient of `loss`, in which tokens may depend on each other.

    The gradient is computed here, over the log-probabilities of all tokens at once. In each chunk the result is linear
    in the log-probabilities, with that gradient.
    """
    logprobs_R = chunked_logprobs(hidden_R.detach(), weight.detach(), targets_R, temperature, chunk_bytes)
    logprobs_R.requires_grad_()
    with torch.enable_grad():
        weighted_R, metrics = loss(logprobs_R, slice(None))
        (grad_R,) = torch.autograd.grad(weighted_R.sum(), logprobs_R)
    weighted_R = weighted_R.detach()

    def linear(logprobs: Tensor, chunk: slice) -> tuple[Tensor, dict[str, Tensor]]:
        change = logprobs - logprobs.detach()  # zero
        return weighted_R[chunk] + grad_R[chunk] * change, {name: values[chunk] for name, values in metrics.items()}

    return linear


def head_loss(
    hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float, loss: ChunkLoss
) -> tuple[Tensor, HeadResult]:
    """Compute the same as `fused_head_loss`, but return a loss whose backward passes the gradients to autograd."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    weight_grad = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
    result, grad_hidden_R = fused_head_loss(hidden_R, weight.detach(), targets_R, temperature, loss, weight_grad)
    return _WithGradients.apply(hidden_R, weight, result.loss, grad_hidden_R, weight_grad), result


class _WithGradients(Function):
    """A loss with precomputed gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_R: Tensor, weight: Tensor, loss: Tensor, grad_hidden_R: Tensor, weight_grad: Tensor | None
    ) -> Tensor:
        ctx.grads = grad_hidden_R, None if weight_grad is None else weight_grad.to(weight.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden_R, grad_weight), ctx.grads = ctx.grads, None
        return grad_hidden_R * grads[0], None if grad_weight is None else grad_weight * grads[0], None, None, None


@torch.no_grad()
def chunked_logprobs(
    hidden_R: Tensor, weight: Tensor, targets_R: Tensor, temperature: float, chunk_bytes: int = GPU_CHUNK_BYTES
) -> Tensor:
    """Return the log-probability of each target token, without gradients."""
    parts = []
    for chunk in _chunks(hidden_R, weight, chunk_bytes):
        logits = wide_product(hidden_R[chunk], weight.t())
        parts.append(_Distribution(logits, targets_R[chunk], temperature).logprobs)
    return torch.cat(parts)


def _chunks(hidden_R: Tensor, weight: Tensor, chunk_bytes: int) -> Iterator[slice]:
    size = max(CHUNK_TOKENS, chunk_bytes // (4 * len(weight))) if hidden_R.is_cuda else CHUNK_TOKENS
    for start in range(0, len(hidden_R), size):
        yield slice(start, start + size)


class _Distribution:
    """The distribution of a chunk's next tokens. Works in place: the logits passed in are overwritten."""

    def __init__(self, logits: Tensor, targets: Tensor, temperature: float) -> None:
        self.targets, self.temperature = targets, temperature
        if logits.is_cuda:
            self.logits = logits
            self.logprobs, self.entropy, self.normalizer = logprobs_and_entropy(logits, targets, temperature)
            return
        if temperature != 1:
            logits.div_(temperature)
        normalizer = logits.logsumexp(-1, keepdim=True)
        self.logprobs = (logits.gather(1, targets[:, None]) - normalizer)[:, 0]
        logits.sub_(normalizer)
        self.probabilities = logits.exp()
        self.entropy = -(self.probabilities * logits).sum(-1)

    def gradient(self, grad_logprobs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the logits: grad * (one-hot - probabilities) / temperature. Can be called once."""
        if grad_logprobs.is_cuda:
            out = torch.empty(self.logits.shape, dtype=dtype, device=self.logits.device)
            logits_gradient(self.logits, self.normalizer, self.targets, grad_logprobs, self.temperature, out)
            del self.logits
            return out
        grad = grad_logprobs[:, None] / self.temperature
        return self.probabilities.mul_(-grad).scatter_add_(1, self.targets[:, None], grad).to(dtype)
