"""Judge in worker processes, so that a reward that hangs, crashes or leaks affects only the response it was judging.

A worker that misses its deadline is killed with everything it started, and replaced. A worker that dies is replaced
too. The response it was judging is tried once more in another worker before it becomes unjudged, so that a process
killed from outside changes no score. A process that a reward detaches into its own session is not killed.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dapo.config import AUTO_WORKERS, RewardConfig
from dapo.errors import RewardError
from dapo.rewards.function import JUDGE_CLOSED, Sample, explain, unjudged
from dapo.rewards.process import WorkerProcess
from dapo.rewards.rules import RULES, score_timeout
from dapo.rewards.task import Job, Kind, Task
from dapo.system.machine import usable_cores
from dapo.types import Prompt, Rollout, Score

START_TIMEOUT = 60.0  # seconds for imports; longer means a hang, not a slow disk
MAX_FAILED_STARTS = 3  # failed starts in a row before queued responses become unjudged
TICK = 0.1  # seconds between checks of deadlines and processes
WORKERS_PER_CORE = 16  # more use memory without judging faster
DISCONNECTED = "the judging process closed its connection"


class _Worker(WorkerProcess):
    """A worker process and its current task. `deadline` is in seconds of the monotonic clock."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.is_ready = False
        self.was_refused = False
        self.task: Task | None = None
        self.has_begun = False
        self.deadline = time.monotonic() + START_TIMEOUT


class WorkerPool:
    """Runs rules and functions from files in worker processes. Every worker can run every one of them.

    One thread owns the workers: it starts them, assigns tasks, reads scores and enforces deadlines. Other threads only
    append to the queue and wake it through a pipe.
    """

    def __init__(self, specs: Sequence[str], options: RewardConfig) -> None:
        self.options = options
        self.size = options.workers or min(usable_cores(), AUTO_WORKERS)
        limit = max(64, WORKERS_PER_CORE * usable_cores())
        if self.size > limit:
            raise RewardError(f"reward.workers is {self.size}; with {usable_cores()} CPU cores, use at most {limit}")
        self.setup = {"specs": list(specs), "options": options.model_dump_json()}
        self.kinds: dict[str, Kind] = {}
        self.workers: list[_Worker] = []
        self.dying: list[_Worker] = []
        self.queue: deque[Task] = deque()
        self.target_size = 1  # workers to keep running; one until a first worker has started
        self.failed_starts = 0
        self.closing = False
        self.lock = threading.Lock()  # guards `queue` and `closing`, which other threads use
        self.selector = selectors.DefaultSelector()
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_writer, False)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, lambda: os.read(self.wake_reader, 4096))
        self.started: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name="dapo-rewards", daemon=True)
        self.thread.start()
        try:
            self.started.result()
        except BaseException:
            self.close()
            raise

    def submit(self, spec: str, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        kind = self.kinds.get(spec, Kind())
        samples = [Sample(r.text, r.tokens.tolist() if kind.wants_tokens else (), r.weight_version) for r in rollouts]
        job = Job(spec, kind, prompt, samples)
        job.future.set_running_or_notify_cancel()  # it can no longer be cancelled
        with self.lock:
            is_open = bool(samples) and not self.closing
            if is_open:
                self.queue.append(Task(job, list(range(len(samples)))))
                self._wake()
        if not is_open:
            job.future.set_result([unjudged(JUDGE_CLOSED)] * len(samples))
        return job.future

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
        reason = JUDGE_CLOSED
        try:
            while not self.closing:
                self._start_missing()
                self._assign_tasks()
                for key, _ in self.selector.select(self._select_timeout()):
                    key.data()
                self._check_workers()
        except BaseException as error:  # whatever the error, no future may stay open
            reason = f"the judge itself failed: {explain(error)}"
            raise
        finally:
            self._shut_down(reason)

    def _shut_down(self, reason: str) -> None:
        with self.lock:
            self.closing = True
        tasks = [*self.queue, *(worker.task for worker in self.workers if worker.task is not None)]
        for worker in [*self.workers]:
            self._kill(worker)
        for task in tasks:
            task.mark_unjudged(task.indices, reason)
        if not self.started.done():
            self.started.set_exception(RewardError(f"reward.use: {reason}"))
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
        if self.queue:  # restore the workers that were given up while idle, or after failed starts
            self.target_size = 1 if self.failed_starts >= MAX_FAILED_STARTS else self.size
        while len(self.workers) < self.target_size:
            try:
                worker = _Worker(self.setup)
            except OSError as error:
                return self._start_failed(f"a judging process cannot be started ({error})")
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
                self.started.set_exception(RewardError(reason))
        elif self.failed_starts >= MAX_FAILED_STARTS and not any(worker.is_ready for worker in self.workers):
            self.target_size = 0
            with self.lock:
                tasks, self.queue = self.queue, deque()
            for task in tasks:
                task.mark_unjudged(task.indices, reason)

    # Assigning tasks

    def _assign_tasks(self) -> None:
        """Give each idle worker a task: a whole group if many are queued, else a share of a group."""
        idle = [worker for worker in self.workers if worker.is_ready and worker.task is None]
        while idle and self.queue:
            with self.lock:
                task, *rest = self.queue.popleft().split(max(1, len(idle) // (len(self.queue) + 1)))
                self.queue.extendleft(reversed(rest))
            try:
                message = task.message()
            except Exception as error:  # the row has a value that JSON cannot encode
                task.mark_unjudged(task.indices, f"the row cannot be sent to the judge ({explain(error)})")
                continue
            worker = idle.pop()
            worker.task, worker.outgoing, worker.stderr_tail = task, message, b""
            worker.deadline = time.monotonic() + START_TIMEOUT  # for imports; {"begin"} sets the real one
            self._write(worker)

    def _write(self, worker: _Worker) -> None:
        """Write as much as the pipe accepts now, and register for the rest."""
        was_waiting = worker.requests in self.selector.get_map()
        is_waiting = worker.write()
        if is_waiting and not was_waiting:
            self.selector.register(worker.requests, selectors.EVENT_WRITE, lambda: self._write(worker))
        elif was_waiting and not is_waiting:
            self.selector.unregister(worker.requests)

    # Reading answers

    def _read_messages(self, worker: _Worker) -> None:
        for line in worker.read_lines():
            try:
                self._handle_message(worker, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                worker.fault = "the judging process sent an invalid message"

    def _read_stderr(self, worker: _Worker) -> None:
        if not worker.read_stderr():
            self.selector.unregister(worker.stderr)

    def _handle_message(self, worker: _Worker, message: object) -> None:
        match message:
            case {"ready": dict(kinds)} if not worker.is_ready:
                self.failed_starts = 0
                worker.is_ready, worker.deadline = True, math.inf
                if not self.started.done():
                    self.kinds = {spec: Kind(*flags) for spec, flags in kinds.items()}
                    self.target_size = self.size
                    self.started.set_result(None)
            case {"refused": str(sentence)} if not worker.is_ready:
                worker.fault, worker.was_refused = sentence, True
            case {"begin": int()} if worker.task is not None:
                worker.has_begun = True
                worker.deadline = time.monotonic() + worker.task.time_limit(self.options.timeout)
            case [int(index), value, acc, error, dict(extras)] if worker.task is not None and worker.has_begun:
                self._record_score(worker, worker.task, index, _score(value, acc, error, extras))
            case _:
                raise ValueError

    def _record_score(self, worker: _Worker, task: Task, index: int, score: Score) -> None:
        task.indices.remove(index)
        task.job.fill(index, score)
        if not task.indices:
            worker.task, worker.has_begun, worker.deadline = None, False, math.inf
        elif task.job.kind.is_sequential:
            worker.deadline = time.monotonic() + task.time_limit(self.options.timeout)  # the next response begins

    # Losing workers

    def _check_workers(self) -> None:
        now = time.monotonic()
        self.dying = [worker for worker in self.dying if not worker.reap()]
        for worker in [*self.workers]:
            if worker.fault is not None:
                self._handle_loss(worker, worker.fault)
            elif worker.is_disconnected or worker.has_exited():
                self._read_messages(worker)  # scores it sent before it ended
                self._handle_loss(worker, worker.fault or worker.exit_reason() or DISCONNECTED)
            elif now > worker.deadline:
                self._read_messages(worker)  # its score may have arrived while this thread was busy
                if worker.fault is None and now > worker.deadline:
                    self._handle_loss(worker, None)

    def _handle_loss(self, worker: _Worker, reason: str | None) -> None:
        """Kill the worker, requeue its task, and mark the response at fault as unjudged.

        A `reason` of None means that the worker missed its deadline.
        """
        self._kill(worker)
        task = worker.task
        if not worker.is_ready:
            # An import that hangs once will hang again, so it is not retried.
            self._start_failed(reason or self._import_timeout_reason(), refused=worker.was_refused or reason is None)
        elif task is None:
            self.target_size -= 1  # it died while idle: replace it only when there is work
        else:
            # A death or a slow import may have an outside cause, so it is retried. A missed deadline is not, except
            # for rules, whose work is bounded; the second time, the response is wrong.
            timed_out, is_rule = reason is None and worker.has_begun, task.job.spec in RULES
            failed, retries = task.assign_blame(has_begun=worker.has_begun, died=not timed_out or is_rule)
            with self.lock:
                self.queue.extendleft(reversed(retries))
            if timed_out and is_rule:
                for index in failed:
                    task.job.fill(index, score_timeout(task.job.spec))
            else:
                timeout = task.timeout_reason(self.options.timeout) if timed_out else self._import_timeout_reason()
                task.mark_unjudged(failed, reason or timeout)

    def _import_timeout_reason(self) -> str:
        files = ", ".join(spec.rpartition(":")[0] or spec for spec in self.setup["specs"])
        return (
            f"reward.use: {files} was still being imported after {START_TIMEOUT:g} s; look for an infinite loop, "
            "or move slow work into the function"
        )

    def _kill(self, worker: _Worker) -> None:
        for fd in (worker.answers, worker.stderr, worker.requests):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        worker.kill()
        self.workers.remove(worker)
        self.dying.append(worker)


def _score(value: object, acc: object, error: object, extras: dict[str, object]) -> Score:
    """Validate a score that a worker sent: a reward that writes into the pipe must not forge scores."""
    if isinstance(error, str) and value is None:
        return unjudged(error)
    if acc is not None and not (isinstance(acc, bool | float) and 0 <= acc <= 1):
        raise ValueError
    if error is None and isinstance(value, float) and math.isfinite(value):
        return Score(value, acc, extras=extras)
    raise ValueError
