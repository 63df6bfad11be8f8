"""The oracle for the tests: plain, padded float64 versions of what dapo computes packed.

Only dapo's records are used here. Each sequence is one row of a right-padded batch, transformers runs it with its own
attention, the whole logits tensor is materialized, and autograd computes the gradients.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dapo.types import Group


def in_float64(model: Any) -> Any:
    """Convert the model to float64, including transformers' RMSNorm, which computes in float32 for any weights."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_rms_norm, module)
    return model.double()


def _rms_norm(self: Any, hidden: Tensor) -> Tensor:
    return self.weight * hidden * (hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def plain_copy(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return a copy of the model that uses transformers' own attention."""
    twin = copy.deepcopy(model).to(dtype)
    twin.set_attn_implementation("sdpa")  # "eager" computes its softmax in float32 for any weights
    return twin


def logprobs(
    model: Any, prompt: Sequence[int], responses: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[Tensor]:
    """Return for each response the log-probabilities of its tokens."""
    rows = [[*prompt, *response] for response in responses]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits / temperature
    everything = logits.log_softmax(-1)
    found = []
    for i, response in enumerate(responses):
        places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(response))
        found.append(everything[i, places, torch.tensor(list(response))])
    return found


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the normalized advantages. A reward of NaN means unjudged."""
    judged = [reward for reward in rewards if not math.isnan(reward)]
    if len(judged) < 2 or max(judged) == min(judged):
        return [0.0] * len(rewards)
    mean = sum(judged) / len(judged)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in judged) / (len(judged) - 1))
    return [0.0 if math.isnan(reward) else (reward - mean) / (std + 1e-6) for reward in rewards]


def mini_batch_loss(
    model: Any,
    groups: Sequence[Group],
    mode: str,
    *,
    low: float = 0.2,
    high: float = 0.28,
    c: float = 10.0,
    kl: float = 0.0,
    temperature: float = 1.0,
    loss: str = "dapo",
    correct: str | None = None,
) -> Tensor:
    """Compute the loss of one whole mini-batch, directly from the definitions.

    `correct` names an importance correction, such as `token-masked`, with the weights at the start of the step in
    `model`.
    """
    sequences: list[Tensor] = []
    for group in groups:
        new = logprobs(model, group.prompt.tokens, [r.tokens.tolist() for r in group.rollouts], temperature)
        weights = advantages(group.rewards.tolist())
        for i, rollout in enumerate(group.rollouts):
            if not group.trains[i]:
                continue
            # Only the model's own tokens are trained on, not those that an environment gave.
            own = [not any(start <= t < end for start, end in rollout.given) for t in range(len(rollout.tokens))]
            mine = new[i][own]
            old = torch.tensor(rollout.logprobs.tolist(), dtype=torch.float64)[own]
            trust: Any = 1.0
            if correct:
                gap, old = mine.detach() - old, mine.detach()
                level, how = correct.split("-")
                ratio = (gap if level == "token" else gap.sum()).exp()
                is_near = (ratio >= 0.5) & (ratio <= 2)
                trust = ratio.clamp(max=2) if how == "truncated" else torch.where(is_near, ratio, 0.0)
            values = trust * token_losses(loss, mine, old, weights[i], low, high, c)
            if kl:
                assert group.ref_logprobs is not None
                delta = torch.tensor(group.ref_logprobs[i].tolist(), dtype=torch.float64)[own] - mine
                values = values + kl * (delta.exp() - delta - 1)
            sequences.append(values)
    if mode == "token-mean":
        return torch.cat(sequences).mean()
    if mode == "seq-mean-token-sum":
        return torch.stack([values.sum() for values in sequences]).mean()
    return torch.stack([values.mean() for values in sequences]).mean()


def token_losses(loss: str, new: Tensor, old: Tensor, a: float, low: float, high: float, c: float) -> Tensor:
    """Return the loss of each token of one response."""
    ratio = (new - old).exp()
    if loss == "cispo":
        return -a * ratio.detach().clamp(1 - low, 1 + high) * new
    if loss == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    if loss == "gmpo":
        bounded = (new - old).clamp(max=high) if a > 0 else (new - old).clamp(min=-low)
        return (-a * bounded.mean().exp()).expand(len(new))
    if loss == "gspo":
        ratio = (new - old).mean().exp().expand(len(new))
    values = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    return values.clamp(max=-c * a) if a < 0 else values


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, grads, strict=True))


def adamw(
    parameters: dict[str, Tensor], grads: dict[str, Tensor], *, lr: float, weight_decay: float, clip: float
) -> dict[str, Tensor]:
    """Return the parameters after one AdamW step (betas 0.9 and 0.999, eps 1e-8) with clipped gradients."""
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    scale = clip / (norm + 1e-6) if norm > clip else 1.0
    after = {}
    for name, value in parameters.items():
        grad = grads[name] * scale
        first, second = 0.1 * grad / (1 - 0.9), 0.001 * grad**2 / (1 - 0.999)
        after[name] = value * (1 - lr * weight_decay) - lr * first / (second.sqrt() + 1e-8)
    return after
