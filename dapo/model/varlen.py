"""Variable-length flash attention over packed families: no padding and no mask, whatever the lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.varlen import varlen_attn

from dapo.model.attention import Family, Rotary
from dapo.model.kernels.share import gather_sum, spread

# torch 2.11 takes fewer key heads than query heads as they come, later versions want to be told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Segments:
    """Queries that follow each other in the pack, and the keys they see: their own, behind those of their prompt.

    A prompt with one response behind it is one segment; with several, the prompt and each response are one each, and
    the prompt's keys are copied in front of every response's own. Attention is causal and aligned at the end.
    """

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        query_lengths: list[int] = []
        key_lengths: list[int] = []
        sources: list[np.ndarray] = []
        for family in families:
            start, length = family.prompt
            prompt = np.arange(start, start + length)
            responses = [(s, n) for s, n in family.responses if n > 0]
            if len(responses) == 1 and responses[0][0] == start + length:
                length += responses[0][1]
                prompt, responses = np.arange(start, start + length), []
            query_lengths.append(length)
            key_lengths.append(length)
            sources.append(prompt)
            for s, n in responses:
                query_lengths.append(n)
                key_lengths.append(len(prompt) + n)
                sources.append(np.concatenate([prompt, np.arange(s, s + n)]))
        order = np.concatenate(sources)
        self.longest_query, self.longest_key = max(query_lengths), max(key_lengths)
        self.query_bounds = _bounds(query_lengths, device)
        self.key_bounds = _bounds(key_lengths, device)
        total = sum(query_lengths)
        self.sources: Tensor | None = None
        if len(order) != total:
            self.sources = torch.from_numpy(order.astype(np.int32)).to(device)
            # For the way back: which copies each token has, as a list per token.
            copies = np.bincount(order, minlength=total)
            self.copy_bounds = _bounds(copies.tolist(), device)
            self.copies = torch.from_numpy(np.argsort(order, kind="stable").astype(np.int32)).to(device)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


class VarlenAttention:
    """The plan for training and prefill on a GPU in bf16; see PackedAttention for what it computes."""

    applies_rotary = False

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self.segments = Segments(families, device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rotary: Rotary | None = None
    ) -> Tensor:
        segments = self.segments
        query_T, key_T, value_T = (part[0].transpose(0, 1) for part in (query, key, value))
        if segments.sources is not None:
            key_T, value_T = (_copied(part, segments) for part in (key_T, value_T))
        output_T = _flash(
            query_T, key_T, value_T, segments.query_bounds, segments.key_bounds,
            segments.longest_query, segments.longest_key, scale=scale, window_size=(-1, 0), **_GROUPED,
        )  # fmt: skip
        return output_T[None]


def _copied(values_ThD: Tensor, segments: Segments) -> Tensor:
    copied = _Copies.apply(values_ThD.flatten(1), segments)
    return copied.unflatten(1, values_ThD.shape[1:])


class _Copies(Function):
    @staticmethod
    def forward(ctx: Any, values_TW: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        assert segments.sources is not None
        return spread(values_TW, segments.sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        segments = ctx.segments
        return gather_sum(grads[0].contiguous(), segments.copy_bounds, segments.copies), None


_flash: Callable[..., Any] = varlen_attn
