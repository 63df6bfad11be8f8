"""Judging in worker processes: whatever a reward does costs that one response, and takes nothing else along.

A worker that is late is killed with all it has started, and replaced. One that dies is replaced too, and the response
it was at gets a second worker before it is blamed, so that a process killed from outside changes no score. What a
reward detaches into a session of its own is the one thing that is not found again.
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

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.function import CLOSED, Sample, explain, unjudged
from dapo.rewards.process import WorkerProcess
from dapo.rewards.task import Job, Kind, Task
from dapo.types import Prompt, Rollout, Score

START_LIMIT = 60.0  # seconds for imports: a hang, not a slow disk
MAX_STARTS = 3  # failures in a row before waiting responses are given up
TICK = 0.1  # seconds between looks at clocks and processes
WORKERS_PER_CORE = 16  # more than that take memory, and judge no faster
CUT_OFF = "the judging process closed its connection"


class _Worker(WorkerProcess):
    """A process, and what it is at. `limit`: the moment on the monotonic clock when it is late."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.is_ready = False
        self.was_refused = False
        self.task: Task | None = None
        self.has_begun = False
        self.limit = time.monotonic() + START_LIMIT


class WorkerPool:
    """Runs rules and functions from files, several of them in the same processes."""

    def __init__(self, specs: Sequence[str], options: RewardConfig) -> None:
        self.options = options
        self.size = options.workers or min(_cores(), 8)
        most = max(64, WORKERS_PER_CORE * _cores())
        if self.size > most:
            raise RewardError(f"reward.workers is {self.size}, but {_cores()} cores here take at most {most} processes")
        self.setup = {"specs": list(specs), "options": options.model_dump_json()}
        self.kinds: dict[str, Kind] = {}
        self.workers: list[_Worker] = []
        self.dying: list[_Worker] = []
        self.queue: deque[Task] = deque()
        self.places = 1  # until it is known that a worker can start
        self.failed_starts = 0
        self.closing = False
        self.lock = threading.Lock()  # over `queue` and `closing`, which other threads touch
        self.selector = selectors.DefaultSelector()
        self.bell, self.ringer = os.pipe()
        os.set_blocking(self.ringer, False)
        self.selector.register(self.bell, selectors.EVENT_READ, lambda: os.read(self.bell, 4096))
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
        samples = [Sample(r.text, r.tokens.tolist() if kind.wants_tokens else ()) for r in rollouts]
        job = Job(spec, kind, prompt, samples)
        job.future.set_running_or_notify_cancel()  # from here on it can only come true
        with self.lock:
            is_open = bool(samples) and not self.closing
            if is_open:
                self.queue.append(Task(job, list(range(len(samples)))))
                self._ring()
        if not is_open:
            job.future.set_result([unjudged(CLOSED)] * len(samples))
        return job.future

    def close(self) -> None:
        with self.lock:
            if not self.closing:
                self.closing = True
                self._ring()
        self.thread.join()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            os.write(self.ringer, b"!")

    def _run(self) -> None:
        reason = CLOSED
        try:
            while not self.closing:
                self._start_missing()
                self._hand_out()
                for key, _ in self.selector.select(self._patience()):
                    key.data()
                self._look_around()
        except BaseException as error:  # whatever it is, nobody may wait forever
            reason = f"the judge itself failed: {explain(error)}"
            raise
        finally:
            self._wind_up(reason)

    def _wind_up(self, reason: str) -> None:
        with self.lock:
            self.closing = True
        tasks = [*self.queue, *(worker.task for worker in self.workers if worker.task is not None)]
        for worker in [*self.workers]:
            self._end(worker)
        for task in tasks:
            task.charge(task.indices, reason)
        if not self.started.done():
            self.started.set_exception(RewardError(f"reward.use: {reason}"))
        for worker in self.dying:
            worker.reap(patience=5.0)
        self.selector.close()
        os.close(self.bell)
        os.close(self.ringer)

    def _patience(self) -> float | None:
        """How long nothing needs to be looked at: forever, unless something is under way."""
        is_short = len(self.workers) < self.places
        return TICK if is_short or self.dying or any(worker.limit < math.inf for worker in self.workers) else None

    # Starting

    def _start_missing(self) -> None:
        if self.queue:  # places that nobody needed were given up
            self.places = 1 if self.failed_starts >= MAX_STARTS else self.size
        while len(self.workers) < self.places:
            try:
                worker = _Worker(self.setup)
            except OSError as error:
                return self._not_started(f"a judging process cannot be started ({error})")
            self.workers.append(worker)
            self.selector.register(worker.answers, selectors.EVENT_READ, lambda worker=worker: self._listen(worker))
            self.selector.register(worker.stderr, selectors.EVENT_READ, lambda worker=worker: self._overhear(worker))
            self._write(worker)
        return None

    def _not_started(self, reason: str, *, refused: bool = False) -> None:
        self.failed_starts += 1
        if not self.started.done():
            if refused or self.failed_starts >= MAX_STARTS:
                self.closing = True
                self.started.set_exception(RewardError(reason))
        elif self.failed_starts >= MAX_STARTS and not any(worker.is_ready for worker in self.workers):
            self.places = 0
            with self.lock:
                tasks, self.queue = self.queue, deque()
            for task in tasks:
                task.charge(task.indices, reason)

    # Handing out

    def _hand_out(self) -> None:
        """Whole groups while there are many; with idle workers to spare, a group is shared among them."""
        idle = [worker for worker in self.workers if worker.is_ready and worker.task is None]
        while idle and self.queue:
            with self.lock:
                task, *rest = self.queue.popleft().split(max(1, len(idle) // (len(self.queue) + 1)))
                self.queue.extendleft(reversed(rest))
            try:
                message = task.message()
            except Exception as error:  # the row holds something that cannot travel
                task.charge(task.indices, f"the row cannot be sent to the judge ({explain(error)})")
                continue
            worker = idle.pop()
            worker.task, worker.outgoing, worker.heard = task, message, b""
            worker.limit = time.monotonic() + START_LIMIT  # until it has imported what this needs, and begins
            self._write(worker)

    def _write(self, worker: _Worker) -> None:
        """As much as the pipe takes now; the rest when it says so."""
        was_waiting = worker.requests in self.selector.get_map()
        is_waiting = worker.write()
        if is_waiting and not was_waiting:
            self.selector.register(worker.requests, selectors.EVENT_WRITE, lambda: self._write(worker))
        elif was_waiting and not is_waiting:
            self.selector.unregister(worker.requests)

    # Listening

    def _listen(self, worker: _Worker) -> None:
        for line in worker.read_lines():
            try:
                self._take(worker, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                worker.fault = "the judging process sent something that is no answer"

    def _overhear(self, worker: _Worker) -> None:
        if not worker.read_stderr():
            self.selector.unregister(worker.stderr)

    def _take(self, worker: _Worker, message: object) -> None:
        match message:
            case {"ready": dict(kinds)} if not worker.is_ready:
                self.failed_starts = 0
                worker.is_ready, worker.limit = True, math.inf
                if not self.started.done():
                    self.kinds = {spec: Kind(*flags) for spec, flags in kinds.items()}
                    self.places = self.size
                    self.started.set_result(None)
            case {"refused": str(sentence)} if not worker.is_ready:
                worker.fault, worker.was_refused = sentence, True
            case {"begin": int()} if worker.task is not None:
                worker.has_begun = True
                worker.limit = time.monotonic() + worker.task.seconds(self.options.timeout)
            case [int(index), value, acc, error, dict(extras)] if worker.task is not None and worker.has_begun:
                self._take_score(worker, worker.task, index, _score(value, acc, error, extras))
            case _:
                raise ValueError

    def _take_score(self, worker: _Worker, task: Task, index: int, score: Score) -> None:
        task.indices.remove(index)
        task.job.fill(index, score)
        if not task.indices:
            worker.task, worker.has_begun, worker.limit = None, False, math.inf
        elif task.job.kind.is_sequential:
            worker.limit = time.monotonic() + self.options.timeout  # the next one begins

    # Losing

    def _look_around(self) -> None:
        now = time.monotonic()
        self.dying = [worker for worker in self.dying if not worker.reap()]
        for worker in [*self.workers]:
            if worker.fault is not None:
                self._lose(worker, worker.fault)
            elif worker.is_cut_off or worker.has_exited():
                self._listen(worker)  # what it said before
                self._lose(worker, worker.fault or worker.last_words() or CUT_OFF)
            elif now > worker.limit:
                self._listen(worker)  # this thread may have been the late one
                if worker.fault is None and now > worker.limit:
                    self._lose(worker, None)

    def _lose(self, worker: _Worker, reason: str | None) -> None:
        """Without a reason it was too slow. Give its work to others, all but what it is to blame for."""
        self._end(worker)
        task = worker.task
        if not worker.is_ready:
            # An import that never ends does not end the next time either.
            self._not_started(reason or self._not_ready(), refused=worker.was_refused or reason is None)
        elif task is None:
            self.places -= 1  # it died of boredom: no other needs to before there is work
        else:
            # Death and late imports are nobody's fault yet; a deadline that has passed is.
            died = reason is not None or not worker.has_begun
            why = reason or (task.late(self.options.timeout) if worker.has_begun else self._not_ready())
            charged, again = task.blame(has_begun=worker.has_begun, died=died)
            with self.lock:
                self.queue.extendleft(reversed(again))
            task.charge(charged, why)

    def _not_ready(self) -> str:
        files = ", ".join(spec.rpartition(":")[0] or spec for spec in self.setup["specs"])
        return (
            f"reward.use: {files} was still being imported after {START_LIMIT:g} s; look for an endless loop, or for "
            "work that belongs into the function"
        )

    def _end(self, worker: _Worker) -> None:
        for fd in (worker.answers, worker.stderr, worker.requests):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        worker.kill()
        self.workers.remove(worker)
        self.dying.append(worker)


def _score(value: object, acc: object, error: object, extras: dict[str, object]) -> Score:
    """Checked once more on this side: a reward that writes into the pipe must not make up what training believes."""
    if isinstance(error, str) and value is None:
        return unjudged(error)
    if error is None and isinstance(value, float) and math.isfinite(value) and (acc is None or isinstance(acc, bool)):
        return Score(value, acc, extras=extras)
    raise ValueError


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
