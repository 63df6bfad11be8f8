"""A causal LM in two parts: the trunk over packed tokens, and the weight that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.kernels import native
from dapo.model.attention import ATTENTION_NAME, AttentionPlan, Family, PackedAttention
from dapo.model.memory import USABLE
from dapo.model.meter import head_size, key_heads
from dapo.model.native_attention import NativeAttention
from dapo.model.products import wide_product
from dapo.model.trunk import can_fuse, trunk_of
from dapo.model.varlen import Layout, Segments, VarlenAttention

CHECKED_TOKENS = 16  # tokens that a model is checked with
_NOT_SUPPORTED = "dapo cannot train it, with any engine"


def query_groups(causal_lm: Any) -> int:
    """Return how many query heads share a key head."""
    config = causal_lm.config.get_text_config()
    return config.num_attention_heads // key_heads(config)


def hidden_states(
    causal_lm: Any, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, *, recompute: bool = False
) -> Tensor:
    """Return the last layer's hidden states [T, d] of packed tokens."""
    return trunk_of(causal_lm).hidden(tokens_T, positions_T, plan, recompute=recompute)


def packed_plan(causal_lm: Any, families: Sequence[Family], positions_T: Tensor) -> AttentionPlan:
    """Return the plan for packed families: in bf16 variable-length kernels, or those in C, else masked attention."""
    if positions_T.is_cuda and causal_lm.dtype == torch.bfloat16:
        return VarlenAttention(Segments(Layout.of(families), positions_T.device))
    return cpu_plan(causal_lm, families, positions_T)


def cpu_plan(
    causal_lm: Any, families: Sequence[Family], positions_T: Tensor, *, capture: bool = False
) -> NativeAttention | PackedAttention:
    """Return a plan that needs no GPU. With `capture` it keeps the keys and values of each layer."""
    groups = query_groups(causal_lm)
    if has_native_attention(causal_lm):
        return NativeAttention(families, positions_T, groups, causal_lm.dtype, capture=capture)
    return PackedAttention(families, positions_T, groups, causal_lm.dtype, capture=capture)


def has_native_attention(causal_lm: Any) -> bool:
    """Return whether the kernels in C compute this model's attention."""
    weight = head_weight(causal_lm)
    return native.can_attend(weight.dtype, weight.device, head_size(causal_lm.config.get_text_config()))


def is_faster_in_bfloat16(causal_lm: Any) -> bool:
    """Return whether this float32 model on a CPU could use the kernels in C for bfloat16."""
    weight = head_weight(causal_lm)
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return native.missing(torch.bfloat16) is None and _without_kernels(causal_lm) is None


def is_slower_without_compiler(causal_lm: Any) -> bool:
    """Return whether this float32 model on a CPU could use the kernels in C if they could be compiled."""
    weight = head_weight(causal_lm)
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not native.has_instructions(torch.float32):
        return False
    return native.obstacle(torch.float32) is not None and _without_kernels(causal_lm) is None


def kernel_obstacle(causal_lm: Any) -> str | None:
    """Return why the kernels in C do not compute all of this model on a CPU, or None if they do."""
    return native.obstacle(head_weight(causal_lm).dtype) or _without_kernels(causal_lm)


def _without_kernels(causal_lm: Any) -> str | None:
    """Return which part of the model has no kernel in C on any machine, or None."""
    if not can_fuse(causal_lm):
        return f"there are none for all of {type(causal_lm).__name__}, as it is configured"
    size = head_size(causal_lm.config.get_text_config())
    return None if size in native.HEAD_SIZES else f"there is none for attention heads of size {size}"


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process can still plan with: those free, or reserved by torch and unused.

    A limit on the process (torch.cuda.set_per_process_memory_fraction, or the environment variable
    PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.5) counts like a smaller GPU.
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    reserved = torch.cuda.memory_reserved(device)
    unused = reserved - torch.cuda.memory_allocated(device)
    return max(0, min(free, limit - reserved) + unused - int((1 - USABLE) * limit))


def head_weight(causal_lm: Any) -> Tensor:
    return causal_lm.get_output_embeddings().weight


def check_model(causal_lm: Any, max_length: int) -> None:
    """Refuse a model that cannot be trained or sampled as head x trunk with our attention.

    The check compares a few logits with those of the model's own forward.
    """
    check_limits(causal_lm, max_length)
    name = causal_lm.config.model_type
    try:
        found, expected = _logits_both_ways(causal_lm)
    except Exception as error:  # the model's own code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"{name} does not run through transformers' attention interface as needed ({reason}); {_NOT_SUPPORTED}"
        ) from error
    # In bf16 a single position with huge activations can be far off in either computation. A wrong formula shows in
    # most positions, so the median decides there.
    error_T = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    is_narrow = head_weight(causal_lm).dtype == torch.bfloat16
    if not (error_T.median() < 0.1 if is_narrow else error_T.max() < 1e-3):
        _check_finite(causal_lm)
        raise ModelError(f"{name} computes its logits in a way that dapo does not reproduce; {_NOT_SUPPORTED}")


def check_limits(causal_lm: Any, max_length: int) -> None:
    """Refuse a model whose context is too short, or whose head is not a plain projection. It needs no weights."""
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


def _check_finite(causal_lm: Any) -> None:
    """Refuse weights that are NaN or infinite, which would otherwise look like a formula that is not reproduced."""
    for name, parameter in causal_lm.named_parameters():
        if bad := int((~torch.isfinite(parameter)).sum()):
            raise ModelError(
                f"the model's weight {name} holds {bad} of {parameter.numel()} values that are NaN or infinite; "
                "fetch or save the model again"
            )


@torch.no_grad()
def _logits_both_ways(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a few tokens by our attention plan and the bare head, and by the model's own forward."""
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
