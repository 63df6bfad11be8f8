"""Forward and backward of small micro-batches as CUDA graphs: launched one by one, their kernels wait for the host.

A micro-batch is copied into tensors of a fixed size, of which there are a few; the rest of them is padding that counts
for nothing. Weights and the sums of their gradients stay where they are, so that a graph stays valid.
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

_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_LONGEST = 4096  # queries or keys of one segment: longer ones keep the GPU busy anyway
_WORTH_IT = 3e13  # operations: about as many as a large GPU does while the host launches the kernels of one pass

Backward = Callable[[Batch, AttentionPlan], HeadResult]


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    segments: FixedSegments
    result: HeadResult


class CapturedBackward:
    def __init__(self, backward: Backward, parameters: int, device: torch.device) -> None:
        self.backward = backward
        self.device = device
        self.sizes = [size for size in _SIZES if 6.0 * parameters * size <= _WORTH_IT]
        self.captured: dict[tuple[FixedSize, bool], _Captured] = {}
        self.pool = GraphPool()

    def __call__(self, batch: Batch) -> HeadResult | None:
        """None where the batch is too large to gain from it."""
        layout = Layout.of(batch.families)
        needed = max(len(batch.tokens_T), len(batch.targets_R))
        tokens = next((size for size in self.sizes if size >= needed), None)
        if tokens is None or max(layout.longest) > _LONGEST:
            return None
        key = FixedSize.of(layout, tokens), batch.ref_logprobs_R is not None
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        captured = self.captured[key]
        captured.segments.fill(layout)
        _copy(batch, captured.batch)
        captured.graph.replay()
        return _own(captured.result, len(batch.targets_R))

    def _capture(self, size: FixedSize, has_reference: bool) -> _Captured:
        """On a batch of padding: its gradient is zero, so that running it changes nothing."""
        batch = _padding(size.tokens, has_reference, self.device)
        segments = FixedSegments(size, self.device)
        plan = VarlenAttention(segments)
        graph, result = self.pool.capture(lambda: self.backward(batch, plan))
        return _Captured(graph, batch, segments, result)


def _padding(size: int, has_reference: bool, device: torch.device) -> Batch:
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
        ref_logprobs_R=zeros(torch.float32) if has_reference else None,
        weights_R=zeros(torch.float32),
        is_current_R=zeros(torch.bool),
    )


def _copy(batch: Batch, fixed: Batch) -> None:
    """What is beyond the end becomes zero: padding weighs nothing in the loss."""
    for part in fields(Batch):
        source, target = getattr(batch, part.name), getattr(fixed, part.name)
        if isinstance(target, Tensor):
            target[: len(source)] = source
            target[len(source) :].zero_()


def _own(result: HeadResult, tokens: int) -> HeadResult:
    """The next replay writes over the graph's own results."""
    return HeadResult(
        loss=result.loss.clone(),
        logprobs_R=result.logprobs_R[:tokens].clone(),
        entropy_R=result.entropy_R[:tokens].clone(),
        metrics={name: values[:tokens].clone() for name, values in result.metrics.items()},
    )
