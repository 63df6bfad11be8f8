"""Keep a set of worker processes running: start them, read what they send, enforce deadlines, and replace lost ones."""

from __future__ import annotations

import json
import math
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from dapo.config import AUTO_WORKERS
from dapo.errors import DapoError
from dapo.rewards.function import explain
from dapo.rewards.process import WorkerProcess
from dapo.system.machine import usable_cores

START_TIMEOUT = 60.0  # seconds for imports; longer means a hang, not a slow disk
MAX_FAILED_STARTS = 3  # in a row, after which queued work fails
TICK = 0.1  # seconds between checks of deadlines and processes
WORKERS_PER_CORE = 16  # more use memory without working faster


class PooledProcess(WorkerProcess):
    """A worker process of a pool. `deadline` is in seconds of the monotonic clock."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.is_ready = False
        self.was_refused = False
        self.deadline = time.monotonic() + START_TIMEOUT


Worker = TypeVar("Worker", bound=PooledProcess)


def pool_size(workers: int, option: str, error: type[DapoError]) -> int:
    """Return the number of processes to start; 0 workers: one per core, at most AUTO_WORKERS."""
    limit = max(64, WORKERS_PER_CORE * usable_cores())
    if workers > limit:
        raise error(f"{option} is {workers}; with {usable_cores()} CPU cores, use at most {limit}")
    return workers or min(usable_cores(), AUTO_WORKERS)


class ProcessPool(ABC, Generic[Worker]):
    """Owns worker processes in one thread. Other threads only append work and wake that thread through a pipe.

    A subclass gives work to the workers, and decides what happens to the work of a lost one.
    """

    error: type[DapoError]  # what opening the pool raises
    closed_reason: str  # why work that is left when the pool is closed has failed

    def __init__(self, size: int, name: str, imports: str) -> None:
        self.size = size
        self.imports = imports  # the option and the files that a worker imports, for messages
        self.workers: list[Worker] = []
        self.dying: list[Worker] = []
        self.target_size = 1  # workers to keep running; one until a first worker has started
        self.failed_starts = 0
        self.closing = False
        self.lock = threading.Lock()  # guards what other threads use
        self.selector = selectors.DefaultSelector()
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_writer, False)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, lambda: os.read(self.wake_reader, 4096))
        self.started: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _new_worker(self) -> Worker: ...

    @abstractmethod
    def _has_work(self) -> bool:
        """Return whether work is queued, for which lost workers are replaced."""

    @abstractmethod
    def _assign(self) -> None:
        """Give work to idle workers."""

    @abstractmethod
    def _on_ready(self, properties: Mapping[str, Any]) -> None:
        """Take the properties of the loaded code, which the first worker reports."""

    @abstractmethod
    def _on_message(self, worker: Worker, message: object) -> None:
        """Handle a message of a worker that is ready; raise ValueError if it is invalid."""

    @abstractmethod
    def _on_loss(self, worker: Worker, reason: str | None) -> None:
        """Fail or requeue the work of a ready worker that was killed. A `reason` of None: it missed its deadline."""

    @abstractmethod
    def _give_up(self, lost: Sequence[Worker], reason: str) -> None:
        """Fail all queued work, and the work of these workers."""

    def _open(self) -> None:
        """Start the thread, and wait until a first worker is ready."""
        self.thread.start()
        try:
            self.started.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self.lock:
            if not self.closing:
                self.closing = True
                self._wake()
        self.thread.join()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
            os.write(self.wake_writer, b"!")

    def _run(self) -> None:
        reason = self.closed_reason
        try:
            while not self.closing:
                self._start_missing()
                self._assign()
                for key, _ in self.selector.select(self._select_timeout()):
                    key.data()
                self._check_workers()
        except BaseException as error:  # whatever the error, no future may stay open
            reason = f"the pool of processes itself failed: {explain(error)}"
            raise
        finally:
            self._shut_down(reason)

    def _shut_down(self, reason: str) -> None:
        with self.lock:
            self.closing = True
        lost = [*self.workers]
        for worker in lost:
            self._kill(worker)
        self._give_up(lost, reason)
        if not self.started.done():
            self.started.set_exception(self.error(reason))
        for worker in self.dying:
            worker.reap(timeout=5.0)
        self.selector.close()
        os.close(self.wake_reader)
        os.close(self.wake_writer)

    def _select_timeout(self) -> float | None:
        """Return how long `select` may block: forever if no deadline, start or exit is pending."""
        has_missing = len(self.workers) < self.target_size
        has_deadline = any(worker.deadline < math.inf for worker in self.workers)
        return TICK if has_missing or has_deadline or self.dying else None

    # Starting

    def _start_missing(self) -> None:
        if self._has_work():  # restore the workers that were given up while idle, or after failed starts
            self.target_size = 1 if self.failed_starts >= MAX_FAILED_STARTS else self.size
        while len(self.workers) < self.target_size:
            try:
                worker = self._new_worker()
            except OSError as error:
                return self._start_failed(f"a worker process cannot be started ({error})")
            self.workers.append(worker)
            self.selector.register(
                worker.answers, selectors.EVENT_READ, lambda worker=worker: self._read_messages(worker)
            )
            self.selector.register(worker.stderr, selectors.EVENT_READ, lambda worker=worker: self._read_stderr(worker))
            self._write(worker)
        return None

    def _start_failed(self, reason: str, *, refused: bool = False) -> None:
        self.failed_starts += 1
        if not self.started.done():
            if refused or self.failed_starts >= MAX_FAILED_STARTS:
                self.closing = True
                self.started.set_exception(self.error(reason))
        elif self.failed_starts >= MAX_FAILED_STARTS and not any(worker.is_ready for worker in self.workers):
            self.target_size = 0
            self._give_up([], reason)

    # Pipes

    def _write(self, worker: Worker) -> None:
        """Write as much as the pipe accepts now, and register for the rest."""
        was_waiting = worker.requests in self.selector.get_map()
        is_waiting = worker.write()
        if is_waiting and not was_waiting:
            self.selector.register(worker.requests, selectors.EVENT_WRITE, lambda: self._write(worker))
        elif was_waiting and not is_waiting:
            self.selector.unregister(worker.requests)

    def _read_messages(self, worker: Worker) -> None:
        for line in worker.read_lines():
            try:
                self._handle_message(worker, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                worker.fault = f"{worker.noun} sent an invalid message"

    def _read_stderr(self, worker: Worker) -> None:
        if not worker.read_stderr():
            self.selector.unregister(worker.stderr)

    def _handle_message(self, worker: Worker, message: object) -> None:
        match message:
            case {"ready": dict(properties)} if not worker.is_ready:
                self.failed_starts = 0
                worker.is_ready, worker.deadline = True, math.inf
                if not self.started.done():
                    self._on_ready(properties)
                    self.target_size = self.size
                    self.started.set_result(None)
            case {"refused": str(sentence)} if not worker.is_ready:
                worker.fault, worker.was_refused = sentence, True
            case _ if worker.is_ready:
                self._on_message(worker, message)
            case _:
                raise ValueError

    # Losing workers

    def _check_workers(self) -> None:
        now = time.monotonic()
        self.dying = [worker for worker in self.dying if not worker.reap()]
        for worker in [*self.workers]:
            if worker.fault is not None:
                self._lose(worker, worker.fault)
            elif worker.is_disconnected or worker.has_exited():
                self._read_messages(worker)  # results it sent before it ended
                self._lose(worker, worker.fault or worker.exit_reason() or f"{worker.noun} closed its connection")
            elif now > worker.deadline:
                self._read_messages(worker)  # its result may have arrived while this thread was busy
                if worker.fault is None and now > worker.deadline:
                    self._lose(worker, None)

    def _lose(self, worker: Worker, reason: str | None) -> None:
        """Kill the worker, and fail or requeue its work. A `reason` of None: it missed its deadline."""
        self._kill(worker)
        if worker.is_ready:
            self._on_loss(worker, reason)
        else:
            # An import that hangs once will hang again, so it is not retried.
            self._start_failed(reason or self._import_timeout_reason(), refused=worker.was_refused or reason is None)

    def _import_timeout_reason(self) -> str:
        return (
            f"{self.imports} was still being imported after {START_TIMEOUT:g} s; look for an infinite loop, or move "
            "slow work into the function"
        )

    def _kill(self, worker: Worker) -> None:
        for fd in (worker.answers, worker.stderr, worker.requests):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        worker.kill()
        self.workers.remove(worker)
        self.dying.append(worker)
