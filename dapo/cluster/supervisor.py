"""The supervisor of a group of Ray actors: starts them, notices deaths and timeouts, and replaces lost actors."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from dapo.errors import ClusterLost, DapoError
from dapo.system.progress import progress
from dapo.types import EventKind, OnEvent

TICK = 0.05  # seconds between checks of timeouts while no answer arrives
PLACEMENT_TICK = 1.0  # seconds between queries to Ray about bundles without a node


class Restarts:
    """The number of processes that the run may lose in all. Learners, engine and judges share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0
        self.lock = threading.Lock()  # engine and judges spend it from their own threads

    def spend(self, reason: str) -> None:
        """Count one loss. Raise ClusterLost if it exceeds the limit."""
        with self.lock:
            self.spent += 1
            is_exceeded = self.spent > self.limit
        if is_exceeded:
            raise ClusterLost(
                f"{reason}; the run has lost more processes than cluster.max_restarts = {self.limit} allows"
            )


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a supervisor counts an actor as lost and reports it.

    missing: a function that names the resources that the cluster lacks to start an actor, or returns None.
    """

    restarts: Restarts
    timeout: float  # seconds in which an actor must answer
    missing: Callable[[], str | None] = lambda: None
    on_event: OnEvent = lambda kind, message: None
    is_stopping: Callable[[], bool] = lambda: False


@dataclass(slots=True, eq=False)
class Call:
    then: Callable[[Any], object]  # receives the answer
    since: float | None  # when the call was made, by time.monotonic(); None: it may take any time


@dataclass(slots=True, eq=False)
class Worker:
    """One actor and the calls that it has not answered yet."""

    slot: int
    actor: Any
    is_open: bool = False
    is_dead: bool = False  # its process or its node has died
    calls: dict[Any, Call] = field(default_factory=dict)  # by Ray's reference of the answer


W = TypeVar("W", bound=Worker)


class Supervisor(Generic[W]):
    """Base of the remote engine, the remote judge and the learners on Ray: actors by slot, and their pending calls.

    If `in_background`, a thread collects the answers; otherwise the caller does while it waits. All state is guarded by
    `changed`. Only the caller's thread calls `on_event`. A user's mistake (a DapoError) that an actor reports is raised
    unchanged, because it would fail in any actor. All other errors count as losses, and so do an actor's `own_faults`.
    """

    role: ClassVar[str]
    loss_event: ClassVar[EventKind]  # kind of the event that reports a loss
    work: ClassVar[str] = ""  # what is done again with a lost actor's groups: sampled, judged
    own_faults: ClassVar[tuple[type[DapoError], ...]] = ()
    in_background: ClassVar[bool] = True

    def __init__(self, rules: Rules) -> None:
        self.restarts, self.timeout, self.missing = rules.restarts, rules.timeout, rules.missing
        self.on_event, self.is_stopping = rules.on_event, rules.is_stopping
        self.workers: list[W] = []
        self.events: list[tuple[EventKind, str]] = []
        self.waiting_for: str | None = None
        self.placement_checked_at = 0.0
        self.failure: BaseException | None = None
        self.is_closing = False
        self.changed = threading.Condition(threading.RLock())
        self.thread: threading.Thread | None = None

    @property
    def open_workers(self) -> list[W]:
        return [worker for worker in self.workers if worker.is_open]

    def close(self) -> None:
        self._stop_thread()
        for worker in self.workers:
            self._kill(worker)
        self.workers = []

    # For subclasses to define

    def _start(self, slot: int) -> tuple[W, Any]:
        """Create the actor of this slot. Return it and the call that opens it.

        Opening is not part of an actor's constructor: Ray reports an exception there as a death and loses its type.
        """
        raise NotImplementedError

    def _opened(self, worker: W, answer: Any) -> None:
        worker.is_open = True

    def _dispatch(self) -> None:
        """Send work to workers that have room for it."""

    def _requeue(self, worker: W) -> int:
        """Take back the groups of a lost worker, and return their number."""
        raise NotImplementedError

    # Called by the caller's thread

    def _open_all(self, count: int, message: str) -> None:
        """Start `count` actors and wait until all are open."""
        try:
            self.workers = [self._opening(slot) for slot in range(count)]
            if self.in_background:
                self.thread = threading.Thread(target=self._run, name=f"dapo {self.role}s", daemon=True)
                self.thread.start()
            with progress(f"{message} {count} {self.role}{'s' * (count > 1)}"):
                self._wait(lambda: len(self.open_workers) == count)
        except BaseException:
            self.close()
            raise

    def _wait(self, is_done: Callable[[], object]) -> None:
        """Wait until `is_done()`. Raise the thread's failure. If no actor can start, stop waiting when asked to."""
        while True:
            self._attend()
            with self.changed:
                if self.failure is not None:
                    raise self.failure
                if is_done():
                    return
                if self.waiting_for and not self.open_workers and self.is_stopping():
                    raise ClusterLost(f"stopped while waiting for {self.waiting_for}")
                if self.thread is not None:
                    self.changed.wait(2 * TICK)
            if self.thread is None:
                self._collect()

    def _attend(self) -> None:
        """Report events, which only the caller's thread may do."""
        with self.changed:
            events, self.events = self.events, []
        for kind, message in events:
            self.on_event(kind, message)

    def _stop_thread(self) -> None:
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()

    # Called by the thread; also by the caller's thread while it holds `changed`

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self._collect()
        except BaseException as error:  # raised by `_wait`; without it the caller would wait forever
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _collect(self) -> None:
        """Handle the answers that arrive within a tick, replace late workers, and dispatch."""
        ready: list[Any] = []
        with self.changed:
            calls = {call: worker for worker in self.workers for call in worker.calls}
            if not calls:
                self.changed.wait(TICK)
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=TICK)
        if ready:  # also take all others that have arrived
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        with self.changed:
            for call in ready:
                if call in calls[call].calls:  # otherwise it was handled meanwhile, or its worker was replaced
                    self._handle(calls[call], call)
            self._check_placement()
            self._check_timeouts()
            self._dispatch()
            self.changed.notify_all()

    def _call(self, worker: W, call: Any, then: Callable[[Any], object], *, has_timeout: bool = True) -> None:
        """Watch this remote call of the worker, and pass its answer to `then`."""
        worker.calls[call] = Call(then, time.monotonic() if has_timeout else None)

    def _finish_calls(self, workers: Iterable[W]) -> None:
        """Wait for the pending calls of these workers and handle the answers."""
        for worker in workers:
            for call in [*worker.calls]:
                if call not in worker.calls:
                    continue  # the worker was lost in an earlier one
                if ray.wait([call], timeout=self.timeout)[0]:
                    self._handle(worker, call)
                else:
                    self._time_out(worker)

    def _handle(self, worker: W, call: Any) -> None:
        then = worker.calls.pop(call).then
        try:
            answer = ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, DapoError) and not isinstance(error.cause, self.own_faults):
                raise error.cause from None
            self._lose(worker, f"failed: {explain(error)}")
        except RayError as error:
            worker.is_dead = True
            self._lose(worker, f"died: {explain(error)}")
        else:
            then(answer)

    def _check_placement(self) -> None:
        """Report what the cluster lacks to start workers. Their timeout begins only when there is room for them."""
        now, starting = time.monotonic(), [worker for worker in self.workers if not worker.is_open]
        if not starting:
            self.waiting_for = None
        elif now - self.placement_checked_at > PLACEMENT_TICK:
            self.placement_checked_at = now
            lacking = self.missing()
            if lacking is not None and lacking != self.waiting_for:
                self.events.append((EventKind.WAITING, f"{self.role}s wait for {lacking}"))
            self.waiting_for = lacking
        if self.waiting_for:
            for call in [call for worker in starting for call in worker.calls.values()]:
                call.since = now

    def _check_timeouts(self) -> None:
        limit = time.monotonic() - self.timeout
        for worker in [*self.workers]:
            late = [call for call, state in worker.calls.items() if state.since is not None and state.since < limit]
            if late and not ray.wait(late, timeout=0)[0]:  # it may have answered while this thread was busy
                self._time_out(worker)

    def _time_out(self, worker: W) -> None:
        self._lose(worker, f"did not answer for {self.timeout:g} s (cluster.timeout)")

    def _lose(self, worker: W, what: str) -> None:
        """Count and report the loss, and replace the worker."""
        reason = f"{self.role} {worker.slot} {what}"
        self.restarts.spend(reason)
        count = self._replace(worker)
        self.events.append((self.loss_event, f"{reason}; replaced, {count} groups are {self.work} again"))

    def _replace(self, worker: W) -> int:
        """Start another actor in this slot, and return the number of groups to repeat."""
        self._kill(worker)
        count = self._requeue(worker)
        self.workers[worker.slot] = self._opening(worker.slot)
        return count

    def _opening(self, slot: int) -> W:
        worker, call = self._start(slot)
        self._call(worker, call, partial(self._opened, worker))
        return worker

    def _kill(self, worker: W) -> None:
        worker.calls.clear()
        ray.kill(worker.actor)


def explain(error: BaseException) -> str:
    """Return the one line of a Ray error that gives the reason.

    The advice after "; " in our own errors is dropped: it is meant for a run with a single engine.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, DapoError):
        return str(cause).partition("; ")[0]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if "raised in its creation task" in text:
        return f"its constructor failed: {text.splitlines()[-1]}"
    found = re.search(r"because (.+?)(?:\.\s|\.?$)", text, re.MULTILINE)
    return found[1] if found else text.splitlines()[-1]
