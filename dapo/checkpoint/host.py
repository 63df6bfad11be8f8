"""Copies of tensors in host memory, which can be written while the originals change."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dapo.system.machine import memory, size_text, usable_cores
from dapo.system.tensors import TensorFiles, as_bytes

_ALIGNMENT = 64  # bytes
_SLOT = 2**27  # bytes of page-locked memory per transfer from a GPU
_PART = 2**23  # bytes that one thread copies at a time
_MAX_THREADS = 16
_FREE_SHARE = 0.5  # largest share of the free memory that a copy may take


class HostMemory:
    """Memory for one copy, reused by the next: new pages from the operating system take longer than copying."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._slots: list[Tensor] = []

    def shortage(self, files: TensorFiles) -> str | None:
        """Return None if a copy of all tensors fits into memory, else a phrase that says what is missing."""
        needed = _layout(files)[1]
        total, available = memory()
        free = available if available is not None else total or 0
        if needed <= len(self._bytes) or needed - len(self._bytes) <= _FREE_SHARE * free:
            return None
        return f"takes {size_text(needed)}, but only {size_text(free)} of memory are free"

    def copy(self, files: TensorFiles) -> TensorFiles:
        """Return copies of all tensors; tied tensors stay tied. The next call overwrites the copies.

        Any thread may call it, after `finish_kernels`. On a GPU the copy runs beside the kernels of other threads.
        """
        offsets, needed = _layout(files)
        if needed > len(self._bytes):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self._bytes = _pages(needed)
        found: dict[tuple[object, ...], Tensor] = {}
        on_gpu: list[tuple[int, Tensor]] = []
        on_host: list[tuple[Tensor, Tensor]] = []
        for tensor in (tensor for tensors in files.values() for tensor in tensors.values()):
            if (key := _identity(tensor)) in found:
                continue
            start, source = offsets[key], as_bytes(tensor)
            target = self._bytes[start : start + len(source)]
            found[key] = target.view(tensor.dtype).view(tensor.shape)
            if tensor.is_cuda:
                on_gpu.append((start, source))
            else:
                on_host.append((target, source))
        with ThreadPoolExecutor(min(usable_cores(), _MAX_THREADS), thread_name_prefix="copy") as threads:
            _copy(on_host, threads)
            if on_gpu:
                self._fetch(sorted(on_gpu, key=lambda placed: placed[0]), threads)
        return {file: {name: found[_identity(t)] for name, t in tensors.items()} for file, tensors in files.items()}

    def _fetch(self, sources: Sequence[tuple[int, Tensor]], threads: ThreadPoolExecutor) -> None:
        """Copy from the GPU through two page-locked slots: one is filled while the other is emptied.

        Page-locking all of the memory would make the copy a little faster, but takes many seconds by itself.
        """
        device = sources[0][1].device
        if not self._slots:
            self._slots = [torch.empty(_SLOT, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        filled: tuple[int, int, torch.cuda.Event] | None = None
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # `as_bytes` copies what is not contiguous
        with torch.cuda.stream(stream):
            for number, parts in groupby(_parts(sources), key=lambda part: part[0]):
                slot, end = self._slots[number % 2], 0
                for _, start, source in parts:
                    end = start + len(source)
                    slot[start:end].copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                if filled is not None:
                    self._empty(*filled, threads)
                filled = number, end, event
            if filled is not None:
                self._empty(*filled, threads)

    def _empty(self, number: int, end: int, event: torch.cuda.Event, threads: ThreadPoolExecutor) -> None:
        event.synchronize()
        start = number * _SLOT
        _copy([(self._bytes[start : start + end], self._slots[number % 2][:end])], threads)


def finish_kernels(files: TensorFiles) -> None:
    """Wait until every GPU has done what this thread asked it to do, so that another thread can read the tensors."""
    for device in {tensor.device for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]], threads: ThreadPoolExecutor) -> None:
    """Copy bytes (target, source) with several threads.

    PyTorch's own threads wait for each other after every tensor, which took ten times as long on a busy machine.
    """
    parts = [
        (target[start : start + _PART].numpy(), source[start : start + _PART].numpy())
        for target, source in pairs
        for start in range(0, len(source), _PART)
    ]
    for _ in threads.map(lambda part: np.copyto(*part), parts):
        pass


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that tied weights share."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _layout(files: TensorFiles) -> tuple[dict[tuple[object, ...], int], int]:
    """Return the offset of each tensor, and the size of all in bytes.

    GPU tensors come first, one after the other, so that whole slots are copied at once.
    """
    tensors = [tensor for held in files.values() for tensor in held.values()]
    offsets: dict[tuple[object, ...], int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: not tensor.is_cuda):
        if (key := _identity(tensor)) not in offsets:
            offsets[key] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _parts(sources: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
    """Split consecutive sources where a slot ends, and yield (number of the slot, start in it, part)."""
    for offset, source in sources:
        done = 0
        while done < len(source):
            number, start = divmod(offset + done, _SLOT)
            count = min(len(source) - done, _SLOT - start)
            yield number, start, source[done : done + count]
            done += count


def _pages(count: int) -> Tensor:
    """Return new memory, in huge pages where the system has them: these are allocated much faster."""
    pages = mmap.mmap(-1, count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
