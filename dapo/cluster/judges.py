"""Judging where Ray has room: judges as actors, and one object that stands for all of them."""

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

from dapo.cluster.actor import Restarts, explain
from dapo.config import REWARD_TOKEN, RewardConfig
from dapo.errors import ClusterLost, DapoError
from dapo.rewards.function import CLOSED, unjudged
from dapo.rewards.judge import at_once, build_judge
from dapo.system.progress import progress
from dapo.types import Prompt, Rollout, Score

TICK = 0.1  # seconds between looks at clocks while nothing arrives
PULSE = 2.0  # seconds between questions to a worker whether it is there
PLACEMENT_TICK = 1.0  # seconds between questions to the cluster about what it lacks


class RewardWorker:
    """The actor: a judge as runs on one machine have it. Timeouts, kills and blame are its own."""

    def open(self, options: str, folder: str, token: str | None) -> None:
        """Apart from the constructor, so that what is wrong comes back as an error and not as a death."""
        if token is not None:  # a node has an environment of its own
            os.environ[REWARD_TOKEN] = token
        with suppress(OSError):  # not there on this node: then this is the job's own copy of it
            os.chdir(folder)
        self.own = build_judge(RewardConfig.model_validate_json(options))

    def judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.own.submit(prompt, rollouts).result()

    def is_there(self) -> None:
        """Answered beside the judging, which may take as long as it takes."""


class _Promise(Future[Any]):
    """Whoever waits for it tells meanwhile what happened: the run's database belongs to that thread."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self.tell = tell
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        self.tell()
        while timeout is None and not self.done():
            wait([self], TICK)
            self.tell()
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
    since: float  # when it was asked, or has answered, whether it is there; at first, when it was told to open
    is_asked: bool = True
    is_open: bool = False
    groups: list[_Group] = field(default_factory=list)


class _Answer(NamedTuple):
    worker: _Worker
    group: _Group | None  # None: that it is open, or there
    future: Future[Any]


class PlacedJudge:
    """The judge protocol over `count` actors that `start(slot, concurrency)` makes.

    A worker has only as many groups as keep it busy; the rest waits here. Groups of a worker that is lost are judged by
    another, and it is replaced. A promise fails only where the run cannot go on: with a sentence of the user's mistake
    or `ClusterLost`. All state belongs to one thread, which lives on messages.
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
        self.waits_for: str | None = None
        self.asked_at = 0.0
        self.fault: BaseException | None = None
        self.is_closed = False
        self.lock = threading.Lock()  # over the end: nothing is put into the inbox after it
        self.opened = _Promise(self._tell)
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
        self._tell()
        group = _Group(prompt, rollouts, _Promise(self._tell))
        with self.lock:
            if self.is_closed:
                self._give_up(group)
            else:
                self.inbox.put(group)
        return group.promise

    def close(self) -> None:
        self.inbox.put(None)
        self.thread.join()

    def _tell(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.on_event(*self.events.get_nowait())

    # All that follows is the thread's

    def _run(self) -> None:
        try:
            while self._take_next():
                self._look_around()
                self._hand_out()
        except BaseException as error:  # whoever waits for a promise would wait forever
            self.fault = error
        with self.lock:
            self.is_closed = True
        self._wind_up()

    def _wind_up(self) -> None:
        self.waiting.extend(group for worker in self.workers for group in worker.groups)
        while not self.inbox.empty():
            message = self.inbox.get()
            if isinstance(message, _Group):
                self.waiting.append(message)
        for group in self.waiting:
            self._give_up(group)
        if not self.opened.done():
            self.opened.set_exception(self.fault or ClusterLost(CLOSED))
        for worker in self.workers:
            ray.kill(worker.actor)

    def _give_up(self, group: _Group) -> None:
        if self.fault is not None:
            group.promise.set_exception(self.fault)
        else:
            group.promise.set_result([unjudged(CLOSED)] * len(group.rollouts))

    def _take_next(self) -> bool:
        """Whether to go on."""
        try:
            message = self.inbox.get(timeout=TICK)
        except queue.Empty:
            return True
        if isinstance(message, _Group):
            self.waiting.append(message)
        elif isinstance(message, _Answer) and self.workers[message.worker.slot] is message.worker:
            self._take(message)
        return message is not None

    def _take(self, answer: _Answer) -> None:
        worker, group, error = answer.worker, answer.group, answer.future.exception()
        if isinstance(error, RayTaskError) and isinstance(error.cause, DapoError):
            raise error.cause from None  # it would be made again by any other
        if error is not None:
            return self._lose(worker, f"{'failed' if isinstance(error, RayTaskError) else 'died'}: {explain(error)}")
        if group is not None:
            worker.groups.remove(group)
            return group.promise.set_result(answer.future.result())
        worker.is_open, worker.is_asked, worker.since = True, False, time.monotonic()
        if not self.opened.done() and all(worker.is_open for worker in self.workers):
            self.opened.set_result(None)
        return None

    def _hand_out(self) -> None:
        """The oldest group to the worker with the least to do."""
        while self.waiting:
            free = [worker for worker in self.workers if worker.is_open and len(worker.groups) < self.limit]
            if not free:
                return
            worker, group = min(free, key=lambda worker: (len(worker.groups), worker.slot)), self.waiting.popleft()
            worker.groups.append(group)
            self._listen(worker.actor.judge.remote(group.prompt, group.rollouts), worker, group)

    def _worker(self, slot: int) -> _Worker:
        actor = self.start(slot, self.limit + 1)  # one more, to say that it is there
        worker = _Worker(slot, actor, time.monotonic())
        call = actor.open.remote(self.options.model_dump_json(), self.folder, os.environ.get(REWARD_TOKEN))
        self._listen(call, worker)
        return worker

    def _listen(self, call: Any, worker: _Worker, group: _Group | None = None) -> None:
        call.future().add_done_callback(lambda future: self.inbox.put(_Answer(worker, group, future)))

    def _look_around(self) -> None:
        """Who is there still, who is late, and whether an actor that should start has no place to."""
        now = time.monotonic()
        self._look_for_room(now)
        for worker in [*self.workers]:
            if self.waits_for and not worker.is_open:
                worker.since = now
            if not worker.is_asked and now - worker.since > PULSE:
                worker.is_asked, worker.since = True, now
                self._listen(worker.actor.is_there.remote(), worker)
            elif worker.is_asked and now - worker.since > self.timeout:
                self._lose(worker, f"did not answer for {self.timeout:g} s (cluster.timeout)")

    def _look_for_room(self, now: float) -> None:
        starting = [worker for worker in self.workers if not worker.is_open]
        if starting and now - self.asked_at > PLACEMENT_TICK:
            self.asked_at = now
            lacking = self.missing()
            if lacking is not None and lacking != self.waits_for:
                self.events.put(("waiting", f"reward workers wait for {lacking}"))
            self.waits_for = lacking
        if self.waits_for and len(starting) == len(self.workers) and self.is_stopping():
            raise ClusterLost(f"told to stop while the run waited for {self.waits_for}")

    def _lose(self, worker: _Worker, what: str) -> None:
        """Another takes its place; what it was judging goes first."""
        story = f"reward worker {worker.slot} {what}"
        ray.kill(worker.actor)
        self.restarts.spend(story)
        groups, worker.groups = worker.groups, []
        self.waiting.extendleft(reversed(groups))
        self.events.put(("reward worker", f"{story}; replaced, {len(groups)} groups are judged again"))
        self.workers[worker.slot] = self._worker(worker.slot)
