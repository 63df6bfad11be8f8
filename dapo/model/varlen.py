"""Variable-length attention over packed families, without padding or masks.

The forward is a kernel that gives the same bits as the sampler's decode attention. The backward is flash attention's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from dapo.kernels.piece_attention import Pieces, piece_attention
from dapo.kernels.share import gather_sum, spread
from dapo.model.attention import Family
from dapo.model.transfer import to_device

_NO_JOINT = (0, 0)
_PADDING = 64  # padding tokens attend to each other in segments of this length


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The pieces (for the forward) and segments (for the backward) into which packed families are cut.

    A piece is a run of tokens as the sampler computed them; the forward copies no keys.

    A segment is a run of queries and the keys that they see. A prompt directly followed by its only response is one
    segment. Otherwise the prompt and each response are one segment each, and the prompt's keys are copied in front of
    each response's own. Attention is causal and aligned at the end: the last query of a segment sees all its keys.
    """

    query_lengths: np.ndarray  # per segment
    key_lengths: np.ndarray  # per segment
    sources_K: np.ndarray  # the token that each key, over all segments, is a copy of
    pieces: np.ndarray  # [pieces, 6]: the columns of Pieces

    @classmethod
    def of(cls, families: Sequence[Family]) -> Layout:
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
        pieces = np.array([piece for family in families for piece in _pieces(family)])
        return cls(np.array(query_lengths), np.array(key_lengths), np.concatenate(sources), pieces)

    @property
    def tokens(self) -> int:
        return int(self.query_lengths.sum())

    @property
    def longest(self) -> tuple[int, int]:
        """Return the greatest number of queries, and of keys, in a segment."""
        return int(self.query_lengths.max()), int(self.key_lengths.max())

    def padded(self, tokens: int) -> Layout:
        """Return the layout with padding tokens at the end, up to `tokens` in all."""
        used = self.tokens
        full, rest = divmod(tokens - used, _PADDING)
        lengths = np.array([_PADDING] * full + [rest] * (rest > 0), dtype=self.query_lengths.dtype)
        return Layout(
            np.concatenate([self.query_lengths, lengths]),
            np.concatenate([self.key_lengths, lengths]),
            np.concatenate([self.sources_K, np.arange(used, tokens)]),
            np.concatenate([self.pieces, _padding_pieces(used, lengths)]),
        )

    def copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the copies of each token's key, for the backward: where the token's list begins, and all lists."""
        counts = np.bincount(self.sources_K, minlength=self.tokens)
        return np.concatenate([[0], np.cumsum(counts)]), np.argsort(self.sources_K, kind="stable")


def _pieces(family: Family) -> list[tuple[int, ...]]:
    """Return the columns of `Pieces` for each piece, as the sampler computes these tokens.

    The sampler prefills the prompt without its last token. That token is the first decode step of each response. It is
    the joint, with what the responses share. So: the prefix on its own, the joint after the prefix, and the rest of
    each response after prefix and joint.
    """
    start, length = family.prompt
    if not family.responses:
        return [(start, length, 0, 0, *_NO_JOINT)]
    prefill = length - family.shared - 1
    prefix, joint = (start, prefill), (start + prefill, family.shared + 1)
    pieces = [(*prefix, 0, 0, *_NO_JOINT), (*joint, *prefix, *_NO_JOINT)]
    pieces += [(*response, *prefix, *joint) for response in family.responses]
    return [piece for piece in pieces if piece[1] > 0]


def _padding_pieces(start: int, lengths: np.ndarray) -> np.ndarray:
    columns = np.zeros((len(lengths), 6), np.int64)
    columns[:, 0], columns[:, 1] = start + np.cumsum(lengths) - lengths, lengths
    return columns


class Segments:
    """A layout as tensors on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.longest_query, self.longest_key = layout.longest
        columns = _tensor(np.ascontiguousarray(layout.pieces.T), device)
        self.pieces = Pieces(*columns, longest=int(layout.pieces[:, 1].max()))
        self.query_bounds = _tensor(_bounds(layout.query_lengths), device)
        self.key_bounds = _tensor(_bounds(layout.key_lengths), device)
        self.sources_K: Tensor | None = None
        if len(layout.sources_K) != layout.tokens:
            self.sources_K = _tensor(layout.sources_K, device)
            self.copy_bounds, self.copies_K = (_tensor(values, device) for values in layout.copies())


@dataclass(frozen=True, slots=True)
class FixedSize:
    """The sizes that a CUDA graph is captured for, rounded up to powers of two so that there are few graphs."""

    tokens: int
    segments: int
    keys: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: Layout, tokens: int) -> FixedSize:
        """Return the smallest size that holds the layout padded to `tokens`."""
        padding = tokens - layout.tokens
        assert padding >= 0
        longest_query, longest_key = layout.longest
        segments = len(layout.query_lengths) + -(-padding // _PADDING)
        return cls(
            tokens,
            # With room for the layout that a graph is captured on, which is all padding.
            segments=_power_of_two(max(segments, -(-tokens // _PADDING))),
            keys=_power_of_two(len(layout.sources_K) + padding),
            longest_query=_power_of_two(longest_query),
            longest_key=_power_of_two(longest_key),
        )


class FixedSegments(Segments):
    """Segments at fixed addresses for a CUDA graph, with room for any layout up to a size. Initially all padding."""

    def __init__(self, size: FixedSize, device: torch.device) -> None:
        self.tokens = size.tokens
        self.longest_query, self.longest_key = size.longest_query, size.longest_key
        self.query_bounds, self.key_bounds = (_zeros(size.segments + 1, device) for _ in range(2))
        self.sources_K, self.copies_K = (_zeros(size.keys, device) for _ in range(2))
        self.copy_bounds = _zeros(size.tokens + 1, device)
        # A segment has at most three pieces: a prompt with its only response is prefix, joint and response.
        self.columns = torch.zeros(6, 3 * size.segments, dtype=torch.int32, device=device)
        self.pieces = Pieces(*self.columns, longest=size.longest_query)
        self.fill(Layout(*(np.zeros(0, np.int64) for _ in range(3)), pieces=np.zeros((0, 6), np.int64)))

    def fill(self, layout: Layout) -> None:
        """Overwrite the contents with a layout, padded to the fixed size."""
        layout = layout.padded(self.tokens)
        assert self.sources_K is not None
        copy_bounds, copies_K = layout.copies()
        for target, values in (
            (self.query_bounds, _bounds(layout.query_lengths)),
            (self.key_bounds, _bounds(layout.key_lengths)),
            (self.sources_K, layout.sources_K),
            (self.copy_bounds, copy_bounds),
            (self.copies_K, copies_K),
        ):
            # Bounds are repeated to the end, which makes the remaining segments empty. Entries of sources_K beyond the
            # last key copy token 0, and no list of copies refers to them.
            filled = np.full(len(target), values[-1] if target is not self.sources_K else 0, np.int32)
            filled[: len(values)] = values
            target.copy_(_tensor(filled, target.device))
        columns = np.zeros(self.columns.shape, np.int32)
        columns[:, : len(layout.pieces)] = layout.pieces.T
        self.columns.copy_(_tensor(columns, self.columns.device))


def _power_of_two(count: int) -> int:
    return max(_PADDING, 1 << (count - 1).bit_length())


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device(values, torch.int32, device)


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


class VarlenAttention:
    """The plan for training and prefill on a GPU in bf16. It computes the same as PackedAttention."""

    applies_rotary = False

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        # The backward of squeeze is a view, that of an index a copy into zeros.
        query_T, key_T, value_T = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
        return _Attend.apply(query_T, key_T, value_T, self.segments, scale)[None]


class _Attend(Function):
    """Attention over [T, H, D]: forward by pieces, without copies; backward by segments, with copied prompt keys."""

    @staticmethod
    def forward(ctx: Any, query_T: Tensor, key_T: Tensor, value_T: Tensor, segments: Segments, scale: float) -> Tensor:
        output_T, lse_HT = piece_attention(query_T, key_T, value_T, segments.pieces, scale)
        ctx.save_for_backward(query_T, key_T, value_T, output_T, lse_HT)
        ctx.segments, ctx.scale = segments, scale
        return output_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_T, key_T, value_T, output_T, lse_HT = ctx.saved_tensors
        segments: Segments = ctx.segments
        key_K, value_K = _copy_prompts(key_T, segments), _copy_prompts(value_T, segments)
        grad_query, grad_key, grad_value = _flash_backward(
            grads[0].contiguous(), query_T, key_K, value_K, output_T, lse_HT, segments, ctx.scale
        )
        return grad_query, _sum_copies(grad_key, segments), _sum_copies(grad_value, segments), None, None


def _copy_prompts(values_ThD: Tensor, segments: Segments) -> Tensor:
    """Return keys or values with the prompt's in front of each response's own."""
    if segments.sources_K is None:
        return values_ThD
    return spread(values_ThD.flatten(1), segments.sources_K).unflatten(1, values_ThD.shape[1:])


def _sum_copies(grads_KhD: Tensor, segments: Segments) -> Tensor:
    """Return the gradient of each token's key or value: the sum over its copies."""
    if segments.sources_K is None:
        return grads_KhD
    flat = grads_KhD.flatten(1).contiguous()
    return gather_sum(flat, segments.copy_bounds, segments.copies_K).unflatten(1, grads_KhD.shape[1:])


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, given the output and logsumexp of any exact forward."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # for dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, segments.query_bounds, segments.key_bounds,
        segments.longest_query, segments.longest_key, 0.0, True, random_state, query.new_empty(0),
        scale=scale, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
