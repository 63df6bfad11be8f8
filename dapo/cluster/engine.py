"""Sampling in processes of their own, on one machine or many: groups go to Ray actors, lost ones are sampled again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dapo.cluster.actor import Restarts, explain
from dapo.errors import ClusterLost, DapoError, EngineError, LearnerLost
from dapo.system.progress import progress
from dapo.types import Request, Rollout

TICK = 0.05  # seconds between looks at clocks and commands while nothing arrives
PLACEMENT_TICK = 1.0  # seconds between questions to the cluster about what it lacks
CLOSING = 5.0  # seconds that an engine has to end what it started


@dataclass(slots=True, eq=False)
class _Weights:
    version: int
    stored: Any  # where they are in Ray's store; none: nobody has asked for them there


@dataclass(slots=True, eq=False)
class _Group:
    request: Request
    missing: set[int]  # members that have not arrived
    again: bool = False  # sampled a second time, members that have arrived included


@dataclass(slots=True, eq=False)
class _Worker:
    slot: int
    actor: Any
    call: Any  # the one answer that is waited for, if any
    since: float  # when it was asked
    is_open: bool = False
    version: int = 0  # of the weights that it has
    weights: _Weights | None = None  # none: those that it started with
    groups: dict[int, _Group] = field(default_factory=dict)
    inbox: list[Request] = field(default_factory=list)  # of `groups`, not sent yet

    @property
    def load(self) -> int:
        return sum(len(group.missing) for group in self.groups.values())


class RayEngine:
    """The engine protocol over `count` actors that `start(slot)` makes.

    A thread of its own hands out groups and takes answers, so that the actors go on while the caller learns. `limit`
    is the number of unfinished responses that a worker is given at once; the rest waits here. `weights()` puts the
    policy's weights into Ray's store. `broadcast(actors, version)`, where there is one, sends them straight to these
    actors; the store is then for those that start later. `missing()` says what the cluster lacks to start an actor, or
    nothing.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        weights: Callable[[], Any],
        *,
        limit: int,
        restarts: Restarts,
        timeout: float,
        broadcast: Callable[[Sequence[Any], int], None] | None = None,
        missing: Callable[[], str | None] = lambda: None,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        is_stopping: Callable[[], bool] = lambda: False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.start, self.weights, self.broadcast = start, weights, broadcast
        self.limit, self.restarts, self.timeout = limit, restarts, timeout
        self.missing, self.on_event, self.is_stopping, self.on_close = missing, on_event, is_stopping, on_close
        self.newest: _Weights | None = None  # none: those that a worker starts with
        self.lacks_weights = False  # a worker needs the newest ones from the store, and they are not there
        self.queue: deque[_Group] = deque()
        self.finished: list[Rollout] = []
        self.events: list[tuple[str, str]] = []
        self.waits_for: str | None = None
        self.asked_at = 0.0
        self.fault: BaseException | None = None
        self.closing = False
        self.changed = threading.Condition(threading.RLock())
        self.workers = [self._worker(slot) for slot in range(count)]
        self.thread = threading.Thread(target=self._run, name="dapo-ray", daemon=True)
        self.thread.start()
        try:
            with progress(f"Starting to sample in {count} process{'es' * (count > 1)}"):
                self._wait(lambda: all(worker.is_open for worker in self.workers))
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self.queue.extend(_Group(request, set(range(request.n))) for request in requests)
            self._hand_out()

    def poll(self) -> list[Rollout]:
        self._wait(lambda: self.finished or not (self.queue or any(worker.groups for worker in self.workers)))
        with self.changed:
            finished, self.finished = self.finished, []
            return finished

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        with self.changed:
            for worker in [worker for worker in self.workers if worker.is_open and gone & worker.groups.keys()]:
                self._settle(worker)
            self.queue = deque(group for group in self.queue if group.request.serial not in gone)
            dropped = [rollout for rollout in self.finished if rollout.serial in gone]
            self.finished = [rollout for rollout in self.finished if rollout.serial not in gone]
            tokens = sum(self._forget(worker, gone & worker.groups.keys()) for worker in self.workers)
            self._hand_out()
            return tokens + sum(map(len, dropped))

    def sync_weights(self, version: int) -> None:
        """Each worker has them before its next step: what it is at then goes on with them."""
        if self.broadcast is not None:
            try:
                self._send_straight(version, self.broadcast)
            except EngineError as error:
                self.on_event("weights", f"{error}; weights go through Ray's store instead")
                self.broadcast = None
        if self.broadcast is None:
            newest = _Weights(version, self.weights())
            with self.changed:
                self.newest, self.lacks_weights = newest, False
                self._hand_out()

    def release_cache(self) -> None:
        """Engines that share a GPU with a learner give its memory back until they sample again."""
        for call in [worker.actor.release_cache.remote() for worker in self.workers]:
            self._value_or(call, None)

    def figures(self) -> dict[str, float]:
        """Counts are summed, shares and seconds are means; of workers that are free to answer, others report later."""
        self._tell()
        with self.changed:
            free = [worker for worker in self.workers if worker.is_open and worker.call is None]
            calls = [worker.actor.figures.remote() for worker in free]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=self.timeout) if calls else ([], [])
        found = [self._value_or(call, {}) for call in ready]
        names = sorted({name for figures in found for name in figures})
        totals = {name: [figures[name] for figures in found if name in figures] for name in names}
        return {name: sum(v) / (len(v) if name.endswith(("occupancy", "_s")) else 1) for name, v in totals.items()}

    def close(self) -> None:
        with self.changed:
            if self.closing:
                return
            self.closing = True
            self.changed.notify_all()
        self.thread.join()
        idle = [worker.actor.close.remote() for worker in self.workers if worker.is_open and not worker.groups]
        if idle:
            ray.wait(idle, num_returns=len(idle), timeout=CLOSING)
        for worker in self.workers:
            ray.kill(worker.actor)
        self.on_close()

    # The caller's side

    def _wait(self, is_there: Callable[[], object]) -> None:
        while True:
            self._tell()
            if self.lacks_weights:
                self._store()
            with self.changed:
                if self.fault is not None:
                    raise self.fault
                if is_there():
                    return
                nobody = not any(worker.is_open for worker in self.workers)
                if nobody and self.waits_for and self.is_stopping():
                    raise ClusterLost(f"told to stop while the run waited for {self.waits_for}")
                self.changed.wait(2 * TICK)

    def _send_straight(self, version: int, broadcast: Callable[[Sequence[Any], int], None]) -> None:
        with self.changed:  # to all of them at once, and nothing else meanwhile
            there = self._settled()
            try:
                if there:
                    broadcast([worker.actor for worker in there], version)
            except LearnerLost as lost:
                # In the middle of the exchange they would wait forever; and what failed once may fail every time.
                for worker in there:
                    ray.kill(worker.actor)
                    self._replace(worker)
                self.broadcast = None
                raise LearnerLost(
                    f"{lost}, while weights were sent to rollout workers, which now get them through Ray's store"
                ) from None
            self.newest, self.lacks_weights = _Weights(version, None), False
            for worker in there:
                worker.version, worker.weights = version, self.newest
            self._hand_out()  # nobody is at anything: the thread has nothing to listen to

    def _settled(self) -> list[_Worker]:
        """Those that are there, with nothing on its way. One may have died while idle: all are asked."""
        for worker in [worker for worker in self.workers if worker.is_open]:
            self._settle(worker)
        asked = [worker for worker in self.workers if worker.is_open]
        for worker in asked:
            worker.call, worker.since = worker.actor.is_there.remote(), time.monotonic()
        for worker in asked:
            self._settle(worker)
        return [worker for worker in self.workers if worker.is_open]

    def _store(self) -> None:
        """Here, and not in the thread: the learners do one thing after the other."""
        reference = self.weights()
        with self.changed:
            assert self.newest is not None
            self.newest.stored, self.lacks_weights = reference, False
            self._hand_out()

    def _settle(self, worker: _Worker) -> None:
        """Wait for what it is at, so that nothing is on its way."""
        if worker.call is not None:
            ready, _ = ray.wait([worker.call], timeout=self.timeout)
            if ready:
                self._take(worker, worker.call)
            else:
                self._lose(worker, self._silence)

    def _forget(self, worker: _Worker, serials: set[int]) -> int:
        """Returns the number of tokens that they had so far."""
        sent = serials - {request.serial for request in worker.inbox}
        worker.inbox = [request for request in worker.inbox if request.serial not in serials]
        for serial in serials:
            del worker.groups[serial]
        return self._value_or(worker.actor.cancel.remote(sorted(sent)), 0) if sent else 0

    def _value_or(self, call: Any, default: Any) -> Any:
        """Of a worker that may be gone, or hang: the step that follows will notice."""
        try:
            return ray.get(call, timeout=self.timeout)
        except RayError:
            return default

    def _tell(self) -> None:
        with self.changed:
            events, self.events = self.events, []
        for kind, message in events:
            self.on_event(kind, message)

    # The thread's side

    def _run(self) -> None:
        try:
            while not self.closing:
                with self.changed:
                    calls = {worker.call: worker for worker in self.workers if worker.call is not None}
                    if not calls:
                        self.changed.wait(TICK)
                        continue
                self._listen(calls)
        except BaseException as error:  # the caller would wait forever
            with self.changed:
                self.fault = error
                self.changed.notify_all()

    def _listen(self, calls: Mapping[Any, _Worker]) -> None:
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=TICK)
        if ready:  # whatever else has arrived comes along
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        with self.changed:
            for call in ready:
                if calls[call].call is call:  # unless the caller took it meanwhile
                    self._take(calls[call], call)
            self._look_around()
            self._hand_out()
            self.changed.notify_all()

    def _take(self, worker: _Worker, call: Any) -> None:
        try:
            answer = ray.get(call)
        except RayTaskError as error:
            # A mistake of the user's would be made again; an engine that has ended may be replaced.
            if isinstance(error.cause, DapoError) and not isinstance(error.cause, EngineError):
                raise error.cause from None
            self._lose(worker, f"failed: {explain(error)}")
        except RayError as error:
            self._lose(worker, f"died: {explain(error)}")
        else:
            worker.call = None
            if worker.is_open:
                self._deliver(worker, answer)
            worker.is_open = True

    def _deliver(self, worker: _Worker, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            group = worker.groups.get(rollout.serial)
            if group is None or rollout.index not in group.missing:
                continue  # cancelled meanwhile, or it had arrived from a worker that is no more
            group.missing.remove(rollout.index)
            # A copy: as they came they keep a piece of the shared store from being given back.
            self.finished.append(replace(rollout, tokens=rollout.tokens.copy(), logprobs=rollout.logprobs.copy()))
            if not group.missing:
                del worker.groups[rollout.serial]
                if group.again:
                    worker.actor.cancel.remote([rollout.serial])  # what was there before is not needed twice

    def _hand_out(self) -> None:
        """The oldest group to the worker with the least to do; what nobody has room for waits."""
        ready = [worker for worker in self.workers if worker.is_open]
        while self.queue and ready:
            group, worker = self.queue[0], min(ready, key=lambda worker: (worker.load, worker.slot))
            if worker.load and worker.load + group.request.n > self.limit:
                break
            worker.groups[group.request.serial] = self.queue.popleft()
            worker.inbox.append(group.request)
        for worker in ready:
            if worker.groups and worker.call is None:
                self._send(worker)

    def _send(self, worker: _Worker) -> None:
        versions: Sequence[int] = ()
        stored: Any = None
        if self.newest is not None and worker.weights is not self.newest:  # one that goes back has a version twice
            if self.newest.stored is None:
                self.lacks_weights = True
                return
            # What is under way counts every version that it went through.
            is_fresh, version = len(worker.inbox) == len(worker.groups), self.newest.version
            versions = (version,) if is_fresh else range(worker.version + 1, version + 1)
            worker.version, worker.weights, stored = version, self.newest, self.newest.stored
        inbox, worker.inbox = worker.inbox, []
        worker.call = worker.actor.step.remote(inbox, versions, stored if versions else None)
        worker.since = time.monotonic()

    def _worker(self, slot: int) -> _Worker:
        actor = self.start(slot)
        return _Worker(slot, actor, actor.open.remote(), time.monotonic())

    def _look_around(self) -> None:
        """Who is late, and whether an actor that should start has no place to."""
        now = time.monotonic()
        starting = [worker for worker in self.workers if not worker.is_open]
        if starting and now - self.asked_at > PLACEMENT_TICK:
            self.asked_at = now
            lacking = self.missing()
            if lacking is not None and lacking != self.waits_for:
                self.events.append(("waiting", f"rollout workers wait for {lacking}"))
            self.waits_for = lacking
        if self.waits_for:
            for worker in starting:
                worker.since = now
        for worker in self.workers:
            is_late = worker.call is not None and now - worker.since > self.timeout
            if is_late and not ray.wait([worker.call], timeout=0)[0]:  # this thread may have been the late one
                self._lose(worker, self._silence)

    @property
    def _silence(self) -> str:
        return f"did not answer for {self.timeout:g} s (cluster.timeout)"

    def _lose(self, worker: _Worker, what: str) -> None:
        """Another takes its place, with the newest weights; its unfinished groups go first, under their serials."""
        story = f"rollout worker {worker.slot} {what}"
        worker.call = None
        ray.kill(worker.actor)
        self.restarts.spend(story)
        self.events.append(("worker", f"{story}; replaced, {len(worker.groups)} groups are sampled again"))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        for group in worker.groups.values():
            group.again = True
        self.queue.extendleft(reversed(worker.groups.values()))
        self.workers[worker.slot] = self._worker(worker.slot)
