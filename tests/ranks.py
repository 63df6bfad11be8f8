"""Real processes that form a torch.distributed group on this machine, for tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# Ranks are forked from one process that has done nothing but import, which takes longer than most of what they do.
multiprocessing.set_forkserver_preload(["dapo.policy.build"])


def run(ranks: int, folder: Path, work: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> Any:
    """What `work` returns on rank 0; all ranks call it with the same arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, (ranks, folder, work, arguments, backend), nprocs=ranks, start_method="forkserver")
    return torch.load(folder / "result.pt", weights_only=False)  # written by ourselves, a moment ago


def _rank(
    rank: int, ranks: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    try:
        found = work(*arguments)
        if rank == 0:
            torch.save(found, folder / "result.pt")
    finally:
        dist.destroy_process_group()
