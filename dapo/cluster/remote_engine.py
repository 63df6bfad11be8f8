"""The engine protocol over Ray actors: dispatch groups to workers, and sample the groups of lost workers again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from dapo.cluster.supervisor import Rules, Supervisor, Worker
from dapo.errors import ClusterLost, EngineError, LearnerLost
from dapo.types import EventKind, Extension, Request, Rollout

CLOSE_TIMEOUT = 5.0  # seconds that an engine has to close before it is killed
IMPATIENT_SECONDS = 0.05  # after which `poll(wait=False)` returns
Key = tuple[int, int | None]  # group serial, and the sample index of an episode's next turn


@dataclass(slots=True, eq=False)
class _Weights:
    version: int
    stored: Any  # reference in Ray's object store; None until a worker needs one


@dataclass(slots=True, eq=False)
class _Group:
    """A group to sample, or the next turn of one of its episodes."""

    work: Request | Extension
    missing: set[int]  # indices of responses that have not arrived
    is_resampled: bool = False  # its worker was lost: all n responses are sampled again, even those that had arrived

    @property
    def request(self) -> Request:
        return self.work if isinstance(self.work, Request) else self.work.request

    @property
    def key(self) -> Key:
        return self.request.serial, None if isinstance(self.work, Request) else self.work.rollout.index


@dataclass(slots=True, eq=False)
class _Worker(Worker):
    version: int = 0  # weight version that it samples with
    weights: _Weights | None = None  # None: the weights that it started with
    groups: dict[Key, _Group] = field(default_factory=dict)
    inbox: list[Request | Extension] = field(default_factory=list)  # the part of `groups` that has not been sent

    @property
    def load(self) -> int:
        """Number of unfinished responses."""
        return sum(len(group.missing) for group in self.groups.values())

    def keys(self, serials: Set[int]) -> set[Key]:
        return {key for key in self.groups if key[0] in serials}


@dataclass(slots=True, eq=False)
class _Home:
    """The worker that has a group's episodes in its cache, and how many of them have not ended."""

    worker: _Worker
    left: int


class RemoteEngine(Supervisor[_Worker]):
    """The engine protocol over `count` actors that `start(slot)` creates.

    The supervisor's thread dispatches groups and collects answers, so that the workers keep sampling while the caller
    learns. A worker has one pending call at most. Only the caller's thread calls the learners.

    limit: unfinished responses that a worker may have at once; other groups wait in `queue`.
    weights: a function that puts the policy's weights into Ray's object store and returns their reference.
    broadcast: a function that sends the weights directly to actors. The store then serves only new workers.
    """

    role, loss_event, work = "rollout worker", EventKind.WORKER, "sampled"
    own_faults = (EngineError,)
    is_repeatable = False
    cache_bytes = 0  # unknown here; a learner on the same GPU suspends the worker for every update anyway

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        weights: Callable[[], Any],
        rules: Rules,
        *,
        limit: int,
        broadcast: Callable[[Sequence[Any], int], None] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rules)
        self.start, self.weights, self.limit = start, weights, limit
        self.broadcast, self.on_close = broadcast, on_close
        self.newest: _Weights | None = None  # None: the weights that a worker starts with
        self.needs_stored_weights = False  # a worker is waiting for `newest.stored`
        self.queue: deque[_Group] = deque()
        self.homes: dict[int, _Home] = {}  # of groups of episodes, by serial
        self.finished: list[Rollout] = []
        self._open_all(count, "Starting")

    def submit(self, requests: Sequence[Request]) -> None:
        with self.changed:
            self.queue.extend(_Group(request, set(range(request.n))) for request in requests)
            self._dispatch()

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Continue episodes before new groups, in the worker that has them in its cache if it still lives."""
        with self.changed:
            self.queue.extendleft(_Group(each, {each.rollout.index}) for each in reversed(extensions))
            self._dispatch()

    def end(self, episodes: Iterable[tuple[int, int]]) -> None:
        with self.changed:
            for serial, index in episodes:
                if (home := self.homes.get(serial)) is None:
                    continue
                home.worker.actor.call.remote("end", [(serial, index)])
                home.left -= 1
                if home.left == 0:
                    del self.homes[serial]

    def poll(self, *, wait: bool = True) -> list[Rollout]:
        end = float("inf") if wait else time.monotonic() + IMPATIENT_SECONDS

        def is_done() -> bool:
            is_idle = not self.queue and not any(worker.groups for worker in self.workers)
            return bool(self.finished) or is_idle or time.monotonic() > end

        self._wait(is_done)
        with self.changed:
            finished, self.finished = self.finished, []
            return finished

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        with self.changed:
            # Finish pending calls first: afterwards no rollout of a canceled group can still arrive.
            self._finish_calls([worker for worker in self.open_workers if worker.keys(gone)])
            self.queue = deque(group for group in self.queue if group.request.serial not in gone)
            dropped = [rollout for rollout in self.finished if rollout.serial in gone]
            self.finished = [rollout for rollout in self.finished if rollout.serial not in gone]
            tokens = sum(self._drop_groups(worker, gone) for worker in self.workers)
            self.homes = {serial: home for serial, home in self.homes.items() if serial not in gone}
            self._dispatch()
            return tokens + sum(rollout.sampled for rollout in dropped)

    def sync_weights(self, version: int) -> None:
        """Give every worker the new weights before its next call. Responses in flight continue with them.

        If too many workers were lost, the next `poll` raises: by then the step that made these weights is complete.
        """
        if self.broadcast is not None:
            try:
                self._broadcast_weights(version, self.broadcast)
            except ClusterLost as lost:
                with self.changed:
                    self.failure = lost
            except EngineError as error:
                self.on_event(EventKind.WEIGHTS, f"{error}; weights go through Ray's object store instead")
                self.broadcast = None
        if self.broadcast is None:
            newest = _Weights(version, self.weights())
            with self.changed:
                self.newest, self.needs_stored_weights = newest, False
                self._dispatch()

    def suspend(self) -> None:
        """Free the cache of engines that share a GPU with a learner, until they sample again."""
        for call in [worker.actor.call.remote("suspend") for worker in self.workers]:
            self._value_or(call, None)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all idle workers: counts are summed, shares and seconds averaged.

        A worker that is sampling is left out and reports its counts in a later step.
        """
        self._attend()
        with self.changed:
            calls = [worker.actor.call.remote("metrics") for worker in self.open_workers if not worker.calls]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=self.timeout) if calls else ([], [])
        found = [self._value_or(call, {}) for call in ready]
        names = sorted({name for metrics in found for name in metrics})
        totals = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
        return {name: sum(v) / (len(v) if name.endswith(("occupancy", "_s")) else 1) for name, v in totals.items()}

    def close(self) -> None:
        self._stop_thread()
        idle = [worker.actor.call.remote("close") for worker in self.open_workers if not worker.groups]
        if idle:
            ray.wait(idle, num_returns=len(idle), timeout=CLOSE_TIMEOUT)
        super().close()
        self.on_close()

    # Called by the caller's thread

    def _attend(self) -> None:
        """Report events, and store the newest weights if a worker needs them: learners take one call at a time."""
        super()._attend()
        if self.needs_stored_weights:
            reference = self.weights()
            with self.changed:
                assert self.newest is not None
                self.newest.stored, self.needs_stored_weights = reference, False
                self._dispatch()

    def _broadcast_weights(self, version: int, broadcast: Callable[[Sequence[Any], int], None]) -> None:
        with self.changed:  # held throughout, because the collective needs all workers, and all idle
            for worker in self.open_workers:  # an idle worker's death is noticed only in a call
                self._call(worker, worker.actor.__ray_ready__.remote(), lambda _: None)
            self._finish_calls(self.open_workers)
            workers = self.open_workers
            try:
                if workers:
                    broadcast([worker.actor for worker in workers], version)
            except LearnerLost as lost:
                # The workers would wait in the collective forever, so all are replaced. This costs no restart: they
                # did not fail. The broadcast is not tried again, since whatever broke it may break it every time.
                for worker in workers:
                    self._replace(worker)
                self.broadcast = None
                raise LearnerLost(
                    f"{lost} while weights were sent to the rollout workers, which now get them through Ray's store"
                ) from None
            self.newest, self.needs_stored_weights = _Weights(version, None), False
            for worker in workers:
                worker.version, worker.weights = version, self.newest
            self._dispatch()

    def _drop_groups(self, worker: _Worker, serials: Set[int]) -> int:
        """Remove these groups from the worker and return the number of tokens generated for them so far."""
        groups = [worker.groups.pop(key) for key in worker.keys(serials)]
        sent = {group.request.serial for group in groups if group.work not in worker.inbox}
        worker.inbox = [work for work in worker.inbox if all(work is not group.work for group in groups)]
        sent |= {serial for serial in serials if serial in self.homes and self.homes[serial].worker is worker}
        return self._value_or(worker.actor.call.remote("cancel", sorted(sent)), 0) if sent else 0

    def _value_or(self, call: Any, default: Any) -> Any:
        """Return the answer, or the default if the worker died or hangs, which the next `step` call will detect."""
        try:
            return ray.get(call, timeout=self.timeout)
        except RayError:
            return default

    # Called by the supervisor's thread; also by the caller's thread while it holds `changed`

    def _start(self, slot: int) -> tuple[_Worker, Any]:
        actor = self.start(slot)
        return _Worker(slot, actor), actor.open.remote()

    def _deliver(self, worker: _Worker, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            group = worker.groups.get((rollout.serial, rollout.index if rollout.given else None))
            if group is None or rollout.index not in group.missing:
                # The group was canceled, or this response had arrived from a worker that was lost.
                if rollout.serial in self.homes:
                    worker.actor.call.remote("end", [(rollout.serial, rollout.index)])
                continue
            group.missing.remove(rollout.index)
            # Copy the arrays: they are views into Ray's object store and would keep its memory from being freed.
            self.finished.append(replace(rollout, tokens=rollout.tokens.copy(), logprobs=rollout.logprobs.copy()))
            if not group.missing:
                del worker.groups[group.key]
                if group.is_resampled and not group.request.turns:
                    worker.actor.call.remote("cancel", [rollout.serial])  # the others had arrived before

    def _dispatch(self) -> None:
        """Assign the oldest groups to the least loaded workers, and call every idle worker that has groups.

        A group is never split. One that is larger than `limit` waits for a worker that has no other group.
        """
        ready = self.open_workers
        while self.queue and ready:
            group, worker = self.queue[0], min(ready, key=lambda worker: (worker.load, worker.slot))
            home = self.homes.get(group.request.serial)
            if isinstance(group.work, Extension):
                worker = home.worker if home is not None and home.worker in ready else worker
            elif worker.load and worker.load + group.request.n > self.limit:
                break
            if home is not None:
                home.worker = worker
            elif group.request.turns:
                self.homes[group.request.serial] = _Home(worker, group.request.n)
            worker.groups[group.key] = self.queue.popleft()
            worker.inbox.append(group.work)
        for worker in ready:
            if worker.groups and not worker.calls:
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
            # worker that has not been sent any of its groups can skip to the newest, and so can one that goes back.
            is_fresh, version = len(worker.inbox) == len(worker.groups), self.newest.version
            goes_back = version <= worker.version
            versions = (version,) if is_fresh or goes_back else range(worker.version + 1, version + 1)
            worker.version, worker.weights, stored = version, self.newest, self.newest.stored
        inbox, worker.inbox = worker.inbox, []
        call = worker.actor.step.remote(inbox, versions, stored)
        self._call(worker, call, lambda rollouts: self._deliver(worker, rollouts))

    def _requeue(self, worker: _Worker) -> int:
        """Return unfinished groups to the front of the queue. They keep their serials."""
        for group in worker.groups.values():
            group.is_resampled = True
        self.queue.extendleft(reversed(worker.groups.values()))
        return len(worker.groups)
