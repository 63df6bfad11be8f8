"""A torch.distributed group of real local processes, for tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# Imports take longer than most tests, so ranks are forked from one process that has done them.
multiprocessing.set_forkserver_preload(["dapo.policy.build"])


def run(ranks: int, folder: Path, work: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> Any:
    """Call `work` with the same arguments on all ranks, and return the result of rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, (ranks, folder, work, arguments, backend), nprocs=ranks, start_method="forkserver")
    return torch.load(folder / "result.pt", weights_only=False)  # safe: written by rank 0 just now


def _rank(
    rank: int, ranks: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks)
    try:
        result = work(*arguments)
        if rank == 0:
            torch.save(result, folder / "result.pt")
    finally:
        dist.destroy_process_group()
