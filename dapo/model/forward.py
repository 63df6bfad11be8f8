"""A causal LM in two parts: the trunk over packed tokens, and the weight that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.model.attention import ATTENTION_NAME, AttentionPlan, Family, PackedAttention
from dapo.model.meter import key_heads
from dapo.model.products import wide_product
from dapo.model.trunk import trunk_of
from dapo.model.varlen import Layout, Segments, VarlenAttention

CHECKED_TOKENS = 16
_ELSEWHERE = "it cannot be trained here, whichever engine samples"


def query_groups(causal_lm: Any) -> int:
    config = causal_lm.config.get_text_config()
    return config.num_attention_heads // key_heads(config)


def hidden_states(
    causal_lm: Any, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, *, recompute: bool = False
) -> Tensor:
    """The last layer's hidden states [T, d] of packed tokens."""
    return trunk_of(causal_lm).hidden(tokens_T, positions_T, plan, recompute=recompute)


def packed_plan(causal_lm: Any, families: Sequence[Family], positions_T: Tensor) -> AttentionPlan:
    """Attention over packed families: by the flash kernels where they run, else by products with masks."""
    if positions_T.is_cuda and causal_lm.dtype == torch.bfloat16:
        return VarlenAttention(Segments(Layout.of(families), positions_T.device))
    return PackedAttention(families, positions_T, query_groups(causal_lm), causal_lm.dtype)


def free_memory(device: torch.device) -> int:
    """Bytes free on a GPU, or held by torch without being in use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


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
    except Exception as error:  # of any kind: it is the model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"{name} does not run through transformers' attention interface as needed ({reason}); {_ELSEWHERE}"
        ) from error
    # In bf16 single positions can be far off either way, where activations are huge; a wrong formula shows in most.
    error_T = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    is_narrow = head_weight(causal_lm).dtype == torch.bfloat16
    if not (error_T.median() < 0.1 if is_narrow else error_T.max() < 1e-3):
        _check_finite(causal_lm)
        raise ModelError(
            f"{name} computes its logits in a way that the embedded engine does not reproduce; {_ELSEWHERE}"
        )


def _check_finite(causal_lm: Any) -> None:
    """Weights that are no numbers compare like a formula that is not reproduced: tell them apart."""
    for name, parameter in causal_lm.named_parameters():
        if bad := int((~torch.isfinite(parameter)).sum()):
            raise ModelError(
                f"the model's weight {name} holds {bad} of {parameter.numel()} values that are NaN or infinite; "
                "fetch or save the model again"
            )


@torch.no_grad()
def _logits_both_ways(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Of a few tokens: by our attention plan and the bare head, and by the model's own forward."""
    weight = head_weight(causal_lm)
    tokens_T = torch.linspace(0.1 * len(weight), 0.9 * len(weight), CHECKED_TOKENS, device=weight.device).long()
    positions_T = torch.arange(CHECKED_TOKENS, device=weight.device)
    with _stock_attention(causal_lm):
        expected = causal_lm(input_ids=tokens_T[None], use_cache=False).logits[0].float()
    plan = packed_plan(causal_lm, [Family((0, CHECKED_TOKENS))], positions_T)
    hidden = hidden_states(causal_lm, tokens_T, positions_T, plan)
    return wide_product(hidden, weight.t()).float(), expected


@contextmanager
def _stock_attention(causal_lm: Any) -> Iterator[None]:
    causal_lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(ATTENTION_NAME)
