"""Attention over packed sequences on a CPU: the kernels in C that decoding uses too, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dapo.kernels import native
from dapo.model.attention import Family, PackedAttention


class NativeAttention:
    """The plan for training and prefill with the kernels in C. It computes the same as PackedAttention."""

    applies_rotary = False

    def __init__(
        self,
        families: Sequence[Family],
        positions_T: Tensor,
        query_groups: int,
        dtype: torch.dtype,
        *,
        capture: bool = False,
    ) -> None:
        self.families, self.positions_T, self.query_groups, self.dtype = families, positions_T, query_groups, dtype
        self.captured: list[tuple[Tensor, Tensor]] | None = [] if capture else None
        starts, counts = torch.zeros(2, 2, len(positions_T), dtype=torch.int64)  # of the prompt's and of the own tokens
        for family in families:
            for at, (start, length) in enumerate((family.prompt, *family.responses)):
                tokens = slice(start, start + length)
                starts[1, tokens], counts[1, tokens] = start, torch.arange(1, length + 1)
                if at > 0:
                    starts[0, tokens], counts[0, tokens] = family.prompt
        self.starts, self.counts = starts, counts
        self.longest = int(counts.sum(0).max())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        if self.captured is not None:
            self.captured.append((key[0].detach(), value[0].detach()))
        return _Attend.apply(query, key, value, self, scale)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query_THD, key_THD, value_THD = (native.with_heads(each[0].transpose(0, 1)) for each in (query, key, value))
        if key_THD.stride(0) != value_THD.stride(0):
            key_THD, value_THD = key_THD.contiguous(), value_THD.contiguous()
        _, kv_heads, head_dim = key_THD.shape
        stride = key_THD.stride(0)
        prompt, own = (
            native.Spans(starts * stride, counts).of(key_THD, value_THD, stride, head_dim)
            for starts, counts in zip(self.starts, self.counts, strict=True)
        )
        return native.attention(query_THD, (prompt, own), kv_heads, self.longest, scale)[None]

    @cached_property
    def masked(self) -> PackedAttention:
        """The plan whose backward is used."""
        return PackedAttention(self.families, self.positions_T, self.query_groups, self.dtype)


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: NativeAttention, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.scale = plan, scale
        return plan.forward(query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = tuple(each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.plan.masked.attend(0, *inputs, ctx.scale)
        return *torch.autograd.grad(output, inputs, grads[0]), None, None
