"""Forward and backward of small micro-batches as CUDA graphs.

Launched one by one, the kernels of a small micro-batch wait for the host. A graph needs inputs of a fixed size: a
micro-batch is copied into buffers of the next larger size, and the padding has weight zero in the loss. Weights and
gradient sums keep their addresses, so a graph stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dapo.model.attention import AttentionPlan
from dapo.model.graphs import GraphPool
from dapo.model.varlen import FixedSegments, FixedSize, Layout, VarlenAttention
from dapo.policy.head import HeadResult
from dapo.policy.packing import Batch

# Tokens that a graph is captured for.
_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_MAX_SEGMENT = 4096  # queries or keys; longer segments keep the GPU busy without a graph
_MAX_FLOPS = 3e13  # of one pass: about what a large GPU computes while the host launches the kernels

Backward = Callable[[Batch, AttentionPlan], HeadResult]


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    segments: FixedSegments
    result: HeadResult


class CapturedBackward:
    """Runs `backward` on a micro-batch by replaying a CUDA graph."""

    def __init__(self, backward: Backward, parameters: int, device: torch.device) -> None:
        self.backward = backward
        self.device = device
        self.sizes = [size for size in _SIZES if 6.0 * parameters * size <= _MAX_FLOPS]
        self.captured: dict[tuple[FixedSize, bool, bool], _Captured] = {}
        self.pool = GraphPool()

    def __call__(self, batch: Batch) -> HeadResult | None:
        """Return the result, or None if the batch is too large to gain from a graph."""
        layout = Layout.of(batch.families)
        needed = max(len(batch.tokens_T), len(batch.targets_R))
        tokens = next((size for size in self.sizes if size >= needed), None)
        if tokens is None or max(layout.longest) > _MAX_SEGMENT:
            return None
        given = batch.ref_logprobs_R is not None, batch.start_logprobs_R is not None
        key = FixedSize.of(layout, tokens), *given
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        captured = self.captured[key]
        captured.segments.fill(layout)
        _copy(batch, captured.batch)
        captured.graph.replay()
        return _copied(captured.result, len(batch.targets_R))

    def _capture(self, size: FixedSize, has_reference: bool, has_start: bool) -> _Captured:
        """Capture on a batch of padding. Capturing runs it, and its gradient is zero."""
        batch = _padding(size.tokens, has_reference, has_start, self.device)
        segments = FixedSegments(size, self.device)
        plan = VarlenAttention(segments)
        graph, result = self.pool.capture(lambda: self.backward(batch, plan))
        return _Captured(graph, batch, segments, result)


def _padding(size: int, has_reference: bool, has_start: bool, device: torch.device) -> Batch:
    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Batch(
        tokens_T=zeros(torch.long),
        positions_T=zeros(torch.long),
        families=(),
        rollouts=(),
        predictors_R=zeros(torch.long),
        targets_R=zeros(torch.long),
        advantages_R=zeros(torch.float32),
        old_logprobs_R=zeros(torch.float32),
        responses_R=zeros(torch.long),
        ref_logprobs_R=zeros(torch.float32) if has_reference else None,
        start_logprobs_R=zeros(torch.float32) if has_start else None,
        weights_R=zeros(torch.float32),
        is_current_R=zeros(torch.bool),
    )


def _copy(batch: Batch, fixed: Batch) -> None:
    """Copy a micro-batch into the fixed buffers and zero the rest, which then has no weight in the loss."""
    for part in fields(Batch):
        source, target = getattr(batch, part.name), getattr(fixed, part.name)
        if isinstance(target, Tensor):
            target[: len(source)] = source
            target[len(source) :].zero_()


def _copied(result: HeadResult, tokens: int) -> HeadResult:
    """Copy a result out of the graph's buffers, which the next replay overwrites, without the padding."""
    return HeadResult(
        loss=result.loss.clone(),
        logprobs_R=result.logprobs_R[:tokens].clone(),
        entropy_R=result.entropy_R[:tokens].clone(),
        metrics={name: values[:tokens].clone() for name, values in result.metrics.items()},
    )
