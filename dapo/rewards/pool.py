"""Judge in worker processes, so that a reward that hangs, crashes or leaks affects only the response it was judging.

A worker that misses its deadline is killed with everything it started, and replaced. A worker that dies is replaced
too. The response it was judging is tried once more in another worker before it becomes unjudged, so that a process
killed from outside changes no score. A process that a reward detaches into its own session is not killed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.function import JUDGE_CLOSED, Sample, explain, unjudged
from dapo.rewards.process_pool import START_TIMEOUT, PooledProcess, ProcessPool, pool_size
from dapo.rewards.rules import RULES, score_timeout
from dapo.rewards.task import Job, Kind, Task
from dapo.types import Prompt, Rollout, Score


class _Worker(PooledProcess):
    """A judging process and its current task."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.task: Task | None = None
        self.has_begun = False


class WorkerPool(ProcessPool[_Worker]):
    """Runs rules and functions from files in worker processes. Every worker can run every one of them."""

    error, closed_reason = RewardError, JUDGE_CLOSED

    def __init__(self, specs: Sequence[str], options: RewardConfig) -> None:
        files = ", ".join(spec.rpartition(":")[0] or spec for spec in specs)
        size = pool_size(options.workers, "reward.workers", self.error)
        super().__init__(size, "dapo-rewards", f"reward.use: {files}")
        self.options = options
        self.setup = {"specs": list(specs), "options": options.model_dump_json()}
        self.kinds: dict[str, Kind] = {}
        self.queue: deque[Task] = deque()
        self._open()

    def submit(self, spec: str, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        kind = self.kinds.get(spec, Kind())
        samples = [Sample(r.text, r.tokens.tolist() if kind.wants_tokens else (), r.weight_version) for r in rollouts]
        job = Job(spec, kind, prompt, samples)
        job.future.set_running_or_notify_cancel()  # it can no longer be canceled
        with self.lock:
            is_open = bool(samples) and not self.closing
            if is_open:
                self.queue.append(Task(job, list(range(len(samples)))))
                self._wake()
        if not is_open:
            job.future.set_result([unjudged(JUDGE_CLOSED)] * len(samples))
        return job.future

    def _new_worker(self) -> _Worker:
        return _Worker(self.setup)

    def _has_work(self) -> bool:
        return bool(self.queue)

    def _on_ready(self, properties: Mapping[str, Any]) -> None:
        self.kinds = {spec: Kind(*flags) for spec, flags in properties.items()}

    def _give_up(self, lost: Sequence[_Worker], reason: str) -> None:
        with self.lock:
            queued, self.queue = self.queue, deque()
        for task in [*queued, *(worker.task for worker in lost if worker.task is not None)]:
            task.mark_unjudged(task.indices, reason)

    def _assign(self) -> None:
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

    def _on_message(self, worker: _Worker, message: object) -> None:
        match message:
            case {"begin": int()} if worker.task is not None:
                worker.has_begun = True
                worker.deadline = time.monotonic() + worker.task.time_limit(self.options.timeout)
            case [int(index), value, acc, error, dict(extras)] if worker.task is not None and worker.has_begun:
                self._record_score(worker, worker.task, index, read_score(value, acc, error, extras))
            case _:
                raise ValueError

    def _record_score(self, worker: _Worker, task: Task, index: int, score: Score) -> None:
        task.indices.remove(index)
        task.job.fill(index, score)
        if not task.indices:
            worker.task, worker.has_begun, worker.deadline = None, False, math.inf
        elif task.job.kind.is_sequential:
            worker.deadline = time.monotonic() + task.time_limit(self.options.timeout)  # the next response begins

    def _on_loss(self, worker: _Worker, reason: str | None) -> None:
        """Requeue the worker's task, and mark the response at fault as unjudged."""
        task = worker.task
        if task is None:
            self.target_size -= 1  # it died while idle: replace it only when there is work
            return
        # A death or a slow import may have an outside cause, so it is retried. A missed deadline is not, except for
        # rules, whose work is bounded; the second time, the response is wrong.
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


def read_score(value: object, acc: object, error: object, extras: dict[str, object]) -> Score:
    """Validate a score that a worker sent: a reward that writes into the pipe must not forge scores."""
    if isinstance(error, str) and value is None:
        return unjudged(error)
    if acc is not None and not (isinstance(acc, bool | float) and 0 <= acc <= 1):
        raise ValueError
    if error is None and isinstance(value, float) and math.isfinite(value):
        return Score(value, acc, extras=extras)
    raise ValueError
