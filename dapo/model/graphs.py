"""Capture a function's kernel launches as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class GraphPool:
    """Graphs that are never replayed at the same time, so that they can share memory for intermediate results."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # one for all captures: torch keeps freed memory apart for each stream

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the captured graph and the result tensors that a replay overwrites.

        `run` is first called outside of the capture, to compile kernels and set up libraries.
        """
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A reward model may run in another thread; its allocations must not fail this capture.
        with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = graph.pool()
        return graph, result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the graphs of an earlier run from being destroyed during a capture, which would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
