"""A causal LM in two parts: the trunk over packed tokens, and the weight that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.model.attention import ATTENTION_NAME, AttentionPlan, Family, PackedAttention


def query_groups(causal_lm: Any) -> int:
    config = causal_lm.config.get_text_config()
    return config.num_attention_heads // key_heads(config)


def key_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def hidden_states(causal_lm: Any, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
    """The last layer's hidden states [T, d] of packed tokens."""
    trunk = causal_lm.base_model
    out = trunk(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, plan=plan)
    return out.last_hidden_state[0]


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices in float32: logits rounded to bf16 are off by a tenth, far more than the weights are."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def head_weight(causal_lm: Any) -> Tensor:
    return causal_lm.get_output_embeddings().weight


def check_model(causal_lm: Any, max_length: int) -> None:
    """Refuse a model whose logits are not head x trunk under our attention, by comparing with its own forward."""
    config = causal_lm.config.get_text_config()
    name = causal_lm.config.model_type
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < max_length:
        raise ModelError(f"{name} attends through a window of {window} tokens, fewer than the {max_length} asked for")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < max_length:
        raise ModelError(
            f"the model's context is {limit} tokens, but data.max_prompt_length + data.max_response_length "
            f"is {max_length}"
        )
    if (
        causal_lm.get_output_embeddings() is None
        or getattr(causal_lm.get_output_embeddings(), "bias", None) is not None
    ):
        raise ModelError(f"{name} has no plain output projection, which the fused loss needs")
    try:
        found, expected = _logits_both_ways(causal_lm)
    except (AttributeError, TypeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{name} does not run through transformers' attention interface as needed ({error})"
        ) from error
    tolerance = 0.1 if head_weight(causal_lm).dtype == torch.bfloat16 else 1e-3
    if not torch.allclose(found, expected, atol=tolerance * float(expected.abs().max()), rtol=0):
        raise ModelError(f"{name} computes its logits in a way the embedded engine does not reproduce")


@torch.no_grad()
def _logits_both_ways(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Of a few tokens: by our attention plan and the bare head, and by the model's own forward."""
    weight = head_weight(causal_lm)
    tokens_T = torch.arange(1, 9, device=weight.device) % len(weight)
    positions_T = torch.arange(8, device=weight.device)
    with _stock_attention(causal_lm):
        expected = causal_lm(input_ids=tokens_T[None], use_cache=False).logits[0].float()
    plan = PackedAttention([Family((0, 8))], positions_T, query_groups(causal_lm), weight.dtype)
    hidden = hidden_states(causal_lm, tokens_T, positions_T, plan)
    return wide_product(hidden, weight.t()).float(), expected


@contextmanager
def _stock_attention(causal_lm: Any) -> Iterator[None]:
    causal_lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(ATTENTION_NAME)
