"""Saves the checkpoints of a run, in the background while it trains on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo.checkpoint.folder import Draft, Savable, begin
from dapo.checkpoint.host import HostMemory, finish_kernels
from dapo.checkpoint.state import TrainerState
from dapo.system.progress import progress
from dapo.types import EventKind


class _Abandoned(Exception):
    """Ends a write that is not wanted any more."""


@dataclass(slots=True, eq=False)
class _Write:
    """One checkpoint that is being written, here or in a thread."""

    draft: Draft
    began: float
    thread: threading.Thread | None = None
    error: BaseException | None = None
    seconds: float = 0.0  # from the start of the save until the checkpoint is complete
    is_copied: threading.Event = field(default_factory=threading.Event)  # also set if the copy failed
    is_ended: threading.Event = field(default_factory=threading.Event)
    is_abandoned: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.draft.finish(self._check)
        self.seconds = time.perf_counter() - self.began

    def run_in_thread(self, memory: HostMemory) -> None:
        try:
            self.draft.files = memory.copy(self.draft.files)
            self.is_copied.set()
            self.run()
        except BaseException as error:  # raised in the thread that trains
            self.error = error
        finally:
            self.draft.files = {}
            self.is_copied.set()
            self.is_ended.set()

    def _check(self) -> None:
        if self.is_abandoned.is_set():
            raise _Abandoned


class Saver:
    """Saves one checkpoint at a time. A thread copies the tensors to host memory, and writes the copy.

    The tensors must not change before `wait_for_copy` returns. Sampling only reads them, so the copy of one step is
    made while the next step samples.

    Learners in other processes write their checkpoints themselves, and training waits for them. It also waits if the
    copy would not fit into memory, which is reported once.

    As a context manager it gives up the checkpoint that is being written if a KeyboardInterrupt ends the block.
    """

    def __init__(
        self, folder: Path, policy: Savable, tokenizer: Any, on_event: Callable[[EventKind, str], None]
    ) -> None:
        self.folder, self.policy, self.tokenizer, self.on_event = folder, policy, tokenizer, on_event
        self._memory = HostMemory()
        self._has_warned = False
        self._write: _Write | None = None
        self._metrics: dict[str, float] = {}

    def save(self, state: TrainerState, *, in_background: bool) -> None:
        """Begin a checkpoint; write all of it unless that can happen in the background."""
        assert self._write is None, "the checkpoint before must have been collected"
        began = time.perf_counter()
        draft = begin(self.folder, state, self.policy, self.tokenizer)
        write = _Write(draft, began)
        if in_background and draft.files and self._has_memory(draft):
            finish_kernels(draft.files)
            write.thread = threading.Thread(
                target=write.run_in_thread, args=(self._memory,), name="checkpoint", daemon=True
            )
            write.thread.start()
        else:
            write.run()
        self._write = write
        self._count("timing_s/checkpoint", time.perf_counter() - began)

    def wait_for_copy(self) -> float:
        """Wait until the tensors may change; return the seconds that this took."""
        write, began = self._write, time.perf_counter()
        if write is None or write.thread is None:
            return 0.0
        write.is_copied.wait()
        seconds = time.perf_counter() - began
        self._count("timing_s/checkpoint", seconds)
        return seconds

    def collect(self, *, wait: bool) -> Path | None:
        """Return the checkpoint that was begun last, once, when it is complete; raise if it could not be written."""
        write = self._write
        if write is None:
            return None
        if write.thread is not None and write.thread.is_alive():
            if not wait:
                return None
            self._wait_for(write)
        self._write = None
        if write.error is not None:
            raise write.error
        self._count("timing_s/checkpoint_write", write.seconds)
        return write.draft.target

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call: those that training waited, and those that the writes took."""
        found, self._metrics = self._metrics, {}
        return found

    def abandon(self) -> None:
        """Stop a write in progress, and delete what it has written."""
        write, self._write = self._write, None
        if write is not None and write.thread is not None:
            write.is_abandoned.set()
            write.thread.join()

    def close(self) -> None:
        """Wait for a write in progress, and free the memory."""
        self.collect(wait=True)
        self._memory = HostMemory()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.abandon()

    def _wait_for(self, write: _Write) -> None:
        began = time.perf_counter()
        try:
            with progress(f"Waiting for the checkpoint of step {write.draft.state.step}"):
                write.is_ended.wait()  # not `join`: if Ctrl-C interrupts that, Python 3.11 takes the thread for ended
        except KeyboardInterrupt:
            self.abandon()
            raise
        self._count("timing_s/checkpoint", time.perf_counter() - began)

    def _has_memory(self, draft: Draft) -> bool:
        shortage = self._memory.shortage(draft.files)
        if shortage and not self._has_warned:
            what = f"a copy of a checkpoint {shortage}; training waits while checkpoints are written"
            self.on_event(EventKind.MEMORY, what)
            self._has_warned = True
        return shortage is None

    def _count(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
