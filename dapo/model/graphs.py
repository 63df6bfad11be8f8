"""Capturing what the host would launch kernel by kernel as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class GraphPool:
    """Graphs that are never replayed at the same time, and share the memory of what they compute on the way."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Runs it first: kernels are compiled and libraries set up then, which cannot be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A reward model may be at work in another thread: what it allocates is none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = graph.pool()
        return graph, result
