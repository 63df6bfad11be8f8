"""The judge protocol over Ray actors: groups are dispatched to reward workers, and lost workers replaced."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from dapo.cluster.rollout_worker import Restarts, explain
from dapo.config import REWARD_TOKEN, RewardConfig
from dapo.errors import ClusterLost, DapoError
from dapo.rewards.function import CLOSED, unjudged
from dapo.rewards.judge import at_once, build_judge
from dapo.system.progress import progress
from dapo.types import Prompt, Rollout, Score

TICK = 0.1  # seconds between checks of timeouts while no message arrives
PULSE = 2.0  # seconds between pings of a worker
PLACEMENT_TICK = 1.0  # seconds between queries to Ray about bundles without a node


class RewardWorker:
    """Ray actor that holds the judge of a local run, which handles timeouts and crashes of reward functions itself."""

    def open(self, options: str, folder: str, token: str | None) -> None:
        """Build the judge.

        Not part of the constructor: Ray reports an exception there as the death of the actor and loses its type.
        """
        if token is not None:  # actors do not inherit the driver's environment
            os.environ[REWARD_TOKEN] = token
        with suppress(OSError):  # no such folder on this node: stay in the job's copy of the working directory
            os.chdir(folder)
        self.own = build_judge(RewardConfig.model_validate_json(options))

    def judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.own.submit(prompt, rollouts).result()

    def ping(self) -> None:
        """Answer concurrently with `judge`, which may take any time."""


class _Promise(Future[Any]):
    """Future that reports events while its caller waits, since only that thread may write to the run's database."""

    def __init__(self, emit_events: Callable[[], None]) -> None:
        super().__init__()
        self.emit_events = emit_events
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        self.emit_events()
        while timeout is None and not self.done():
            wait([self], TICK)
            self.emit_events()
        return super().result(timeout)


@dataclass(slots=True, eq=False)
class _Group:
    prompt: Prompt
    rollouts: Sequence[Rollout]
    promise: _Promise


@dataclass(slots=True, eq=False)
class _Worker:
    slot: int
    actor: Any
    since: float  # when `open` or the last ping was sent or answered, by time.monotonic()
    is_pending: bool = True  # `open` or a ping is pending
    is_open: bool = False
    groups: list[_Group] = field(default_factory=list)


class _Answer(NamedTuple):
    worker: _Worker
    group: _Group | None  # None: the answer to `open` or `ping`
    future: Future[Any]


class PlacedJudge:
    """The judge protocol over `count` actors that `start(slot, concurrency)` creates.

    A worker gets only as many groups as keep it busy; the others wait here. A lost worker is replaced, and its groups
    are judged again. A promise fails only where the run cannot continue: because of a user's mistake, or with
    `ClusterLost`. All state belongs to one thread, which receives messages through `inbox`.
    """

    def __init__(
        self,
        start: Callable[[int, int], Any],
        count: int,
        options: RewardConfig,
        *,
        restarts: Restarts,
        timeout: float,
        missing: Callable[[], str | None] = lambda: None,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.start, self.restarts, self.timeout = start, restarts, timeout
        self.missing, self.on_event, self.is_stopping = missing, on_event, is_stopping
        self.options = options.model_copy(update={"workers": options.workers or 1})
        self.limit = at_once(self.options)
        self.folder = os.getcwd()
        self.inbox: queue.SimpleQueue[_Group | _Answer | None] = queue.SimpleQueue()  # None: close
        self.waiting: deque[_Group] = deque()
        self.events: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.waiting_for: str | None = None
        self.placement_checked_at = 0.0
        self.failure: BaseException | None = None
        self.is_closed = False
        self.lock = threading.Lock()  # guards `is_closed`: no group enters the inbox after it is set
        self.opened = _Promise(self._emit_events)
        self.workers = [self._worker(slot) for slot in range(count)]
        self.thread = threading.Thread(target=self._run, name="dapo-judges", daemon=True)
        self.thread.start()
        try:
            with progress(f"Starting {count} reward worker{'s' * (count > 1)}"):
                self.opened.result()
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        self._emit_events()
        group = _Group(prompt, rollouts, _Promise(self._emit_events))
        with self.lock:
            if self.is_closed:
                self._give_up(group)
            else:
                self.inbox.put(group)
        return group.promise

    def close(self) -> None:
        self.inbox.put(None)
        self.thread.join()

    def _emit_events(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.on_event(*self.events.get_nowait())

    # Called by the judges' thread only

    def _run(self) -> None:
        try:
            while self._handle_next():
                self._check_workers()
                self._dispatch()
        except BaseException as error:  # passed on through the promises; their callers would otherwise wait forever
            self.failure = error
        with self.lock:
            self.is_closed = True
        self._wind_up()

    def _wind_up(self) -> None:
        """Resolve all open promises and kill the workers."""
        self.waiting.extend(group for worker in self.workers for group in worker.groups)
        while not self.inbox.empty():
            message = self.inbox.get()
            if isinstance(message, _Group):
                self.waiting.append(message)
        for group in self.waiting:
            self._give_up(group)
        if not self.opened.done():
            self.opened.set_exception(self.failure or ClusterLost(CLOSED))
        for worker in self.workers:
            ray.kill(worker.actor)

    def _give_up(self, group: _Group) -> None:
        if self.failure is not None:
            group.promise.set_exception(self.failure)
        else:
            group.promise.set_result([unjudged(CLOSED)] * len(group.rollouts))

    def _handle_next(self) -> bool:
        """Handle the next message, if one arrives within a tick. Return False if it was the request to close."""
        try:
            message = self.inbox.get(timeout=TICK)
        except queue.Empty:
            return True
        if isinstance(message, _Group):
            self.waiting.append(message)
        # An answer from a worker that was replaced meanwhile is ignored.
        elif isinstance(message, _Answer) and self.workers[message.worker.slot] is message.worker:
            self._handle(message)
        return message is not None

    def _handle(self, answer: _Answer) -> None:
        worker, group, error = answer.worker, answer.group, answer.future.exception()
        if isinstance(error, RayTaskError) and isinstance(error.cause, DapoError):
            raise error.cause from None  # a user's mistake would fail in any worker
        if error is not None:
            return self._lose(worker, f"{'failed' if isinstance(error, RayTaskError) else 'died'}: {explain(error)}")
        if group is not None:
            worker.groups.remove(group)
            return group.promise.set_result(answer.future.result())
        worker.is_open, worker.is_pending, worker.since = True, False, time.monotonic()
        if not self.opened.done() and all(worker.is_open for worker in self.workers):
            self.opened.set_result(None)
        return None

    def _dispatch(self) -> None:
        """Assign the oldest groups to the least loaded workers."""
        while self.waiting:
            free = [worker for worker in self.workers if worker.is_open and len(worker.groups) < self.limit]
            if not free:
                return
            worker, group = min(free, key=lambda worker: (len(worker.groups), worker.slot)), self.waiting.popleft()
            worker.groups.append(group)
            self._forward_answer(worker.actor.judge.remote(group.prompt, group.rollouts), worker, group)

    def _worker(self, slot: int) -> _Worker:
        actor = self.start(slot, self.limit + 1)  # one more for `ping`
        worker = _Worker(slot, actor, time.monotonic())
        call = actor.open.remote(self.options.model_dump_json(), self.folder, os.environ.get(REWARD_TOKEN))
        self._forward_answer(call, worker)
        return worker

    def _forward_answer(self, call: Any, worker: _Worker, group: _Group | None = None) -> None:
        """Put the answer of this call into the inbox when it arrives."""
        call.future().add_done_callback(lambda future: self.inbox.put(_Answer(worker, group, future)))

    def _check_workers(self) -> None:
        """Ping workers, replace those that do not answer in time, and report what the cluster lacks."""
        now = time.monotonic()
        self._check_placement(now)
        for worker in [*self.workers]:
            if self.waiting_for and not worker.is_open:
                worker.since = now  # the timeout starts when the cluster has room
            if not worker.is_pending and now - worker.since > PULSE:
                worker.is_pending, worker.since = True, now
                self._forward_answer(worker.actor.ping.remote(), worker)
            elif worker.is_pending and now - worker.since > self.timeout:
                self._lose(worker, f"did not answer for {self.timeout:g} s (cluster.timeout)")

    def _check_placement(self, now: float) -> None:
        starting = [worker for worker in self.workers if not worker.is_open]
        if starting and now - self.placement_checked_at > PLACEMENT_TICK:
            self.placement_checked_at = now
            lacking = self.missing()
            if lacking is not None and lacking != self.waiting_for:
                self.events.put(("waiting", f"reward workers wait for {lacking}"))
            self.waiting_for = lacking
        if self.waiting_for and len(starting) == len(self.workers) and self.is_stopping():
            raise ClusterLost(f"stopped while waiting for {self.waiting_for}")

    def _lose(self, worker: _Worker, what: str) -> None:
        """Count and report the loss, and replace the worker. Its groups return to the front of the queue."""
        reason = f"reward worker {worker.slot} {what}"
        ray.kill(worker.actor)
        self.restarts.spend(reason)
        groups, worker.groups = worker.groups, []
        self.waiting.extendleft(reversed(groups))
        self.events.put(("reward worker", f"{reason}; replaced, {len(groups)} groups are judged again"))
        self.workers[worker.slot] = self._worker(worker.slot)
