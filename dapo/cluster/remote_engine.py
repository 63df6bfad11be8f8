"""The engine protocol over Ray actors: groups are dispatched to workers, and those of lost workers sampled again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dapo.cluster.rollout_worker import Restarts, explain
from dapo.errors import ClusterLost, DapoError, EngineError, LearnerLost
from dapo.system.progress import progress
from dapo.types import Request, Rollout

TICK = 0.05  # seconds between checks of timeouts and commands while no answer arrives
PLACEMENT_TICK = 1.0  # seconds between queries to Ray about bundles without a node
CLOSE_TIMEOUT = 5.0  # seconds that an engine has to close before it is killed


@dataclass(slots=True, eq=False)
class _Weights:
    version: int
    stored: Any  # their reference in Ray's object store; None until a worker needs them from there


@dataclass(slots=True, eq=False)
class _Group:
    request: Request
    missing: set[int]  # indices of responses that have not arrived
    is_resampled: bool = False  # its first worker was lost; the new one samples all n, also those that had arrived


@dataclass(slots=True, eq=False)
class _Worker:
    slot: int
    actor: Any
    call: Any  # the pending remote call, at most one; None if idle
    since: float  # when that call was made, by time.monotonic()
    is_open: bool = False
    version: int = 0  # weight version that it samples with
    weights: _Weights | None = None  # None: those that it started with
    groups: dict[int, _Group] = field(default_factory=dict)
    inbox: list[Request] = field(default_factory=list)  # the part of `groups` that has not been sent

    @property
    def load(self) -> int:
        """Number of unfinished responses."""
        return sum(len(group.missing) for group in self.groups.values())


class RayEngine:
    """The engine protocol over `count` actors that `start(slot)` creates.

    A thread dispatches groups and collects answers, so that the workers keep sampling while the caller learns. All
    state is guarded by `changed`. Only the caller's thread calls the learners and `on_event`.

    limit: unfinished responses that a worker may have at once; other groups wait in `queue`.
    weights: puts the policy's weights into Ray's object store and returns their reference.
    broadcast: sends the weights directly to these actors. The store then serves only workers that start later.
    missing: names the resources that the cluster lacks to start a worker, or returns None.
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
        self.newest: _Weights | None = None  # None: those that a worker starts with
        self.needs_stored_weights = False  # a worker waits for `newest.stored`, which is None
        self.queue: deque[_Group] = deque()
        self.finished: list[Rollout] = []
        self.events: list[tuple[str, str]] = []
        self.waiting_for: str | None = None
        self.placement_checked_at = 0.0
        self.failure: BaseException | None = None
        self.closing = False
        self.changed = threading.Condition(threading.RLock())
        self.workers = [self._worker(slot) for slot in range(count)]
        self.thread = threading.Thread(target=self._run, name="dapo-ray", daemon=True)
        self.thread.start()
        try:
            with progress(f"Starting {count} rollout worker{'s' * (count > 1)}"):
                self._wait(lambda: all(worker.is_open for worker in self.workers))
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self.queue.extend(_Group(request, set(range(request.n))) for request in requests)
            self._dispatch()

    def poll(self) -> list[Rollout]:
        self._wait(lambda: self.finished or not (self.queue or any(worker.groups for worker in self.workers)))
        with self.changed:
            finished, self.finished = self.finished, []
            return finished

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        with self.changed:
            # Finish pending calls first: afterwards no rollout of a canceled group can still arrive.
            for worker in [worker for worker in self.workers if worker.is_open and gone & worker.groups.keys()]:
                self._finish_call(worker)
            self.queue = deque(group for group in self.queue if group.request.serial not in gone)
            dropped = [rollout for rollout in self.finished if rollout.serial in gone]
            self.finished = [rollout for rollout in self.finished if rollout.serial not in gone]
            tokens = sum(self._drop_groups(worker, gone & worker.groups.keys()) for worker in self.workers)
            self._dispatch()
            return tokens + sum(map(len, dropped))

    def sync_weights(self, version: int) -> None:
        """Give every worker the new weights before its next call. Responses in flight continue with them."""
        if self.broadcast is not None:
            try:
                self._broadcast_weights(version, self.broadcast)
            except EngineError as error:
                self.on_event("weights", f"{error}; weights go through Ray's object store instead")
                self.broadcast = None
        if self.broadcast is None:
            newest = _Weights(version, self.weights())
            with self.changed:
                self.newest, self.needs_stored_weights = newest, False
                self._dispatch()

    def release_cache(self) -> None:
        """Free the cache of engines that share a GPU with a learner, until they sample again."""
        for call in [worker.actor.release_cache.remote() for worker in self.workers]:
            self._value_or(call, None)

    def figures(self) -> dict[str, float]:
        """Return the metrics of all idle workers: counts are summed, shares and seconds averaged.

        A worker that is sampling is left out and reports its counts in a later step.
        """
        self._emit_events()
        with self.changed:
            free = [worker for worker in self.workers if worker.is_open and worker.call is None]
            calls = [worker.actor.figures.remote() for worker in free]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=self.timeout) if calls else ([], [])
        found = [self._value_or(call, {}) for call in ready]
        names = sorted({name for metrics in found for name in metrics})
        totals = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
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
            ray.wait(idle, num_returns=len(idle), timeout=CLOSE_TIMEOUT)
        for worker in self.workers:
            ray.kill(worker.actor)
        self.on_close()

    # Called by the caller's thread

    def _wait(self, is_done: Callable[[], object]) -> None:
        """Wait until `is_done`. Meanwhile report events, store weights on demand, and raise the thread's failure."""
        while True:
            self._emit_events()
            if self.needs_stored_weights:
                self._store_weights()
            with self.changed:
                if self.failure is not None:
                    raise self.failure
                if is_done():
                    return
                none_is_open = not any(worker.is_open for worker in self.workers)
                if none_is_open and self.waiting_for and self.is_stopping():
                    raise ClusterLost(f"stopped while waiting for {self.waiting_for}")
                self.changed.wait(2 * TICK)

    def _broadcast_weights(self, version: int, broadcast: Callable[[Sequence[Any], int], None]) -> None:
        with self.changed:  # held throughout: the collective needs all workers at once, all of them idle
            workers = self._finish_all_calls()
            try:
                if workers:
                    broadcast([worker.actor for worker in workers], version)
            except LearnerLost as lost:
                # The workers would wait in the collective forever, so all are replaced. This costs no restart: they
                # did not fail. The broadcast is not tried again, since whatever broke it may break it every time.
                for worker in workers:
                    ray.kill(worker.actor)
                    self._replace(worker)
                self.broadcast = None
                raise LearnerLost(
                    f"{lost} while weights were sent to the rollout workers, which now get them through Ray's store"
                ) from None
            self.newest, self.needs_stored_weights = _Weights(version, None), False
            for worker in workers:
                worker.version, worker.weights = version, self.newest
            self._dispatch()  # all workers are idle: without new calls the thread would have nothing to wait for

    def _finish_all_calls(self) -> list[_Worker]:
        """Return the live workers, all idle. Each is pinged, since the death of an idle worker shows only in a call."""
        for worker in [worker for worker in self.workers if worker.is_open]:
            self._finish_call(worker)
        pinged = [worker for worker in self.workers if worker.is_open]
        for worker in pinged:
            worker.call, worker.since = worker.actor.ping.remote(), time.monotonic()
        for worker in pinged:
            self._finish_call(worker)
        return [worker for worker in self.workers if worker.is_open]

    def _store_weights(self) -> None:
        """Put the newest weights into the store, in the caller's thread: learners take one call at a time."""
        reference = self.weights()
        with self.changed:
            assert self.newest is not None
            self.newest.stored, self.needs_stored_weights = reference, False
            self._dispatch()

    def _finish_call(self, worker: _Worker) -> None:
        """Wait for the worker's pending call and handle its answer."""
        if worker.call is not None:
            ready, _ = ray.wait([worker.call], timeout=self.timeout)
            if ready:
                self._handle(worker, worker.call)
            else:
                self._lose(worker, self._timeout_reason)

    def _drop_groups(self, worker: _Worker, serials: set[int]) -> int:
        """Remove these groups from the worker and return the number of tokens generated for them so far."""
        sent = serials - {request.serial for request in worker.inbox}
        worker.inbox = [request for request in worker.inbox if request.serial not in serials]
        for serial in serials:
            del worker.groups[serial]
        return self._value_or(worker.actor.cancel.remote(sorted(sent)), 0) if sent else 0

    def _value_or(self, call: Any, default: Any) -> Any:
        """Return the answer, or the default if the worker died or hangs. The next `step` call will detect that."""
        try:
            return ray.get(call, timeout=self.timeout)
        except RayError:
            return default

    def _emit_events(self) -> None:
        with self.changed:
            events, self.events = self.events, []
        for kind, message in events:
            self.on_event(kind, message)

    # Called by the engine's thread; also by the caller's thread while it holds `changed`

    def _run(self) -> None:
        try:
            while not self.closing:
                with self.changed:
                    calls = {worker.call: worker for worker in self.workers if worker.call is not None}
                    if not calls:
                        self.changed.wait(TICK)
                        continue
                self._collect(calls)
        except BaseException as error:  # raised by `_wait`; without it the caller would wait forever
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _collect(self, calls: Mapping[Any, _Worker]) -> None:
        """Handle the answers that arrive within a tick, check timeouts, and dispatch."""
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=TICK)
        if ready:  # take all others that have arrived as well
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        with self.changed:
            for call in ready:
                if calls[call].call is call:  # else the caller's thread has handled it
                    self._handle(calls[call], call)
            self._check_workers()
            self._dispatch()
            self.changed.notify_all()

    def _handle(self, worker: _Worker, call: Any) -> None:
        try:
            answer = ray.get(call)
        except RayTaskError as error:
            # A user's mistake would fail in any worker, so it ends the run. An engine that failed can be replaced.
            if isinstance(error.cause, DapoError) and not isinstance(error.cause, EngineError):
                raise error.cause from None
            self._lose(worker, f"failed: {explain(error)}")
        except RayError as error:
            self._lose(worker, f"died: {explain(error)}")
        else:
            worker.call = None
            if worker.is_open:  # else this answers `open`, and carries no rollouts
                self._deliver(worker, answer)
            worker.is_open = True

    def _deliver(self, worker: _Worker, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            group = worker.groups.get(rollout.serial)
            if group is None or rollout.index not in group.missing:
                continue  # the group was canceled, or this response had arrived from a worker that was lost
            group.missing.remove(rollout.index)
            # Copy the arrays: they are views into Ray's object store and would keep its memory from being freed.
            self.finished.append(replace(rollout, tokens=rollout.tokens.copy(), logprobs=rollout.logprobs.copy()))
            if not group.missing:
                del worker.groups[rollout.serial]
                if group.is_resampled:
                    worker.actor.cancel.remote([rollout.serial])  # stop responses that had arrived before

    def _dispatch(self) -> None:
        """Assign the oldest groups to the least loaded workers, and call every idle worker that has groups.

        A group is never split. One that is larger than `limit` waits for a worker that has no other group.
        """
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
        """Call `step` on an idle worker, with the newest weights if it has older ones."""
        versions: Sequence[int] = ()
        stored: Any = None
        # Identity, not version: a run that returns to a checkpoint reaches the same version twice.
        if self.newest is not None and worker.weights is not self.newest:
            if self.newest.stored is None:
                self.needs_stored_weights = True
                return
            # Responses in flight record every version that they pass through, so the engine must see each one. A
            # worker that has not been sent any of its groups can skip to the newest.
            is_fresh, version = len(worker.inbox) == len(worker.groups), self.newest.version
            versions = (version,) if is_fresh else range(worker.version + 1, version + 1)
            worker.version, worker.weights, stored = version, self.newest, self.newest.stored
        inbox, worker.inbox = worker.inbox, []
        worker.call = worker.actor.step.remote(inbox, versions, stored if versions else None)
        worker.since = time.monotonic()

    def _worker(self, slot: int) -> _Worker:
        actor = self.start(slot)
        return _Worker(slot, actor, actor.open.remote(), time.monotonic())

    def _check_workers(self) -> None:
        """Replace workers that do not answer in time, and report what the cluster lacks to start others."""
        now = time.monotonic()
        starting = [worker for worker in self.workers if not worker.is_open]
        if starting and now - self.placement_checked_at > PLACEMENT_TICK:
            self.placement_checked_at = now
            lacking = self.missing()
            if lacking is not None and lacking != self.waiting_for:
                self.events.append(("waiting", f"rollout workers wait for {lacking}"))
            self.waiting_for = lacking
        if self.waiting_for:  # the timeout starts when the cluster has room
            for worker in starting:
                worker.since = now
        for worker in self.workers:
            is_late = worker.call is not None and now - worker.since > self.timeout
            if is_late and not ray.wait([worker.call], timeout=0)[0]:  # it may have answered while this thread was busy
                self._lose(worker, self._timeout_reason)

    @property
    def _timeout_reason(self) -> str:
        return f"did not answer for {self.timeout:g} s (cluster.timeout)"

    def _lose(self, worker: _Worker, what: str) -> None:
        """Count and report the loss, and replace the worker."""
        reason = f"rollout worker {worker.slot} {what}"
        worker.call = None
        ray.kill(worker.actor)
        self.restarts.spend(reason)
        self.events.append(("worker", f"{reason}; replaced, {len(worker.groups)} groups are sampled again"))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Start a new worker in this slot. Unfinished groups keep their serials and return to the queue's front."""
        for group in worker.groups.values():
            group.is_resampled = True
        self.queue.extendleft(reversed(worker.groups.values()))
        self.workers[worker.slot] = self._worker(worker.slot)
