"""Train the runs of a plan side by side: one run per worker, and as many workers as a Ray cluster has room for.

`session` keeps the records of what is done and what is left.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch

from dapo.ablation.placed_worker import PlacedWorker
from dapo.ablation.plan import Plan, PlannedRun
from dapo.ablation.process import signals_collected
from dapo.ablation.records import Status, read_status
from dapo.ablation.session import Session, recorded_base
from dapo.ablation.task import Base, Line, News, Outcome
from dapo.cluster.placement import Bundle, describe, room, wants_gpus
from dapo.cluster.supervisor import Restarts, Rules, Supervisor, Worker
from dapo.config import REWARD_TOKEN
from dapo.errors import ClusterError, ClusterLost, DapoError
from dapo.training.run_directory import is_locked
from dapo.types import EventKind

_SLOW_START = 30.0  # seconds after which the user is told that no worker has started
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_SHARED_MEMORY = 0.92  # of a GPU that several runs share; the rest is for their CUDA contexts


@dataclass(frozen=True, slots=True)
class Site:
    """The resources of one run, and how many runs each node has room for. `per_gpu` runs share a GPU."""

    each: Bundle
    per_node: tuple[int, ...]
    per_gpu: int = 1

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[Bundle], per_gpu: int = 1) -> Site:
        """Give a run its share of a GPU if it trains on one, and as many CPUs as it has threads.

        Refuse a cluster without room.
        """
        gpus = sum(node.get("GPU", 0.0) for node in nodes)
        on_gpu = max(wants_gpus(run.config, gpus) for run in plan.runs)
        if per_gpu > 1 and not on_gpu:
            raise ClusterError("--runs-per-gpu: the runs train on CPUs; leave it out")
        threads = torch.get_num_threads()
        if on_gpu:  # at most the run's share of its node's CPUs
            shares = (node.get("CPU", 0.0) // (node["GPU"] * per_gpu) for node in nodes if node.get("GPU"))
            threads = int(min([threads, *filter(None, shares)]))
        each = room(max(threads, 1), int(on_gpu))
        # Whole GPUs times runs: a quotient of fractions would round to one run too few.
        fits = (
            min(int(node.get(name, 0.0) // amount) * (per_gpu if name == "GPU" else 1) for name, amount in each.items())
            for node in nodes
        )
        site = cls(each, tuple(filter(None, fits)), per_gpu)
        if not site.per_node:
            hint = "" if on_gpu else "; set OMP_NUM_THREADS to give a run fewer threads, each of which takes a CPU"
            largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)))
            raise ClusterError(
                f"--ray: a run needs {describe(each)} on one node, but the largest node has {describe(largest)}{hint}"
            )
        return site

    def sentence(self, left: int) -> str:
        """Return a sentence on how many of the `left` runs train at once, and where."""
        count = min(left, sum(self.per_node))
        nodes = f"{len(self.per_node)} node{'s' * (len(self.per_node) > 1)}"
        at_once = "one run at a time" if count == 1 else f"{count} runs side by side"
        has_threads = count < left and "GPU" not in self.each and self.each["CPU"] > 1
        hint = "; with a lower OMP_NUM_THREADS there is room for more" if has_threads else ""
        resources = describe(self.each)
        if self.per_gpu > 1:
            resources = resources.replace("1 GPU", f"1/{self.per_gpu} of a GPU")
        return f"{at_once} on {nodes}, each with {resources}{hint}"

    @property
    def shared(self) -> str | None:
        """The resource that runs compete for: "GPU", "node", or None."""
        if "GPU" in self.each:
            return "GPU" if self.per_gpu > 1 else None
        return "node" if max(self.per_node) > 1 else None

    @property
    def gpu_share(self) -> float:
        """The fraction of a GPU that a run asks Ray for, which counts in steps of 0.0001."""
        return self.each.get("GPU", 0.0) * (10_000 // self.per_gpu) / 10_000

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a worker's process."""
        # On a CPU the number of threads changes how sums round: take that of a run without Ray.
        variables = {"OMP_NUM_THREADS": str(int(self.each["CPU"]))}
        if self.per_gpu > 1:  # a run plans with this limit as if the GPU were smaller
            given = os.environ.get(_ALLOCATOR, "")
            limit = f"per_process_memory_fraction:{_SHARED_MEMORY / self.per_gpu:.4f}"
            variables[_ALLOCATOR] = f"{given},{limit}" if given else limit
        if REWARD_TOKEN in os.environ:
            variables[REWARD_TOKEN] = os.environ[REWARD_TOKEN]
        return variables


@dataclass(slots=True, eq=False)
class _Place(Worker):
    """A worker, its node, and the run that it trains."""

    node: str = ""
    task: tuple[int, PlannedRun] | None = None
    has_begun: bool = False  # the worker has answered since it got the task


class SideBySide(Supervisor[_Place]):
    """Gives each idle worker the next run, in the order of the plan.

    Runs that share their first evaluation make it once: the others wait for the run that makes it. A run that loses
    its worker resumes on another one, up to cluster.max_restarts times.
    """

    role = "worker"
    loss_event = EventKind.WORKER
    own_faults = (DapoError,)
    in_background = False

    def __init__(self, session: Session, site: Site, say: Callable[[str], None]) -> None:
        options = session.plan.config.cluster
        rules = Rules(Restarts(options.max_restarts), options.timeout, on_event=lambda kind, message: say(message))
        super().__init__(rules)
        self.session, self.site, self.say = session, site, say
        self.waiting = session.unfinished()
        runs = list(enumerate(session.plan.runs, start=1))
        # Number of a run -> number of the first run with the same first evaluation.
        self.groups = {number: next(i for i, first in runs if run.has_base_of(first)) for number, run in runs}
        self.bases: dict[int, Base] = {}  # by group
        self.losses: dict[int, Restarts] = {}  # number of a run that lost its worker -> the losses it may have
        self.locked: dict[int, float] = {}  # number of a lost run whose folder is still locked -> when that was noticed
        self.received: list[int] = []  # signals
        self.passed_on = 0  # how many of them were sent to the runs
        self.slow_at: float | None = time.monotonic() + _SLOW_START
        self.witness = session.plan.out.absolute() / f".shared-{uuid.uuid4().hex}"

    def train(self) -> None:
        """Train all runs that are left. On a signal, all running ones save and end."""
        count = min(len(self.waiting), sum(self.site.per_node))
        try:
            self.witness.touch()
            with signals_collected() as self.received:
                self.workers = [self._opening(slot) for slot in range(count)]
                self._wait(lambda: not self._under_way and (self.received or not self.waiting))
            if self.received:
                self.session.signal = self.received[0]
        finally:
            self.close()
            with suppress(OSError):
                self.witness.unlink()

    @property
    def _under_way(self) -> list[_Place]:
        return [worker for worker in self.workers if worker.task is not None]

    def _start(self, slot: int) -> tuple[_Place, Any]:
        kind: Any = ray.remote(PlacedWorker)
        actor = kind.options(
            num_cpus=self.site.each["CPU"],
            num_gpus=self.site.gpu_share,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy="SPREAD",  # over all nodes, because runs on the same node slow each other down
        ).remote()
        return _Place(slot, actor), actor.open.remote(str(self.witness), os.getcwd(), self.site.variables())

    def _opened(self, worker: _Place, answer: str) -> None:
        worker.is_open, worker.node = True, answer

    def _dispatch(self) -> None:
        self._pass_signals_on()
        if self.slow_at is not None and time.monotonic() > self.slow_at:
            self.slow_at = None
            if not self.open_workers:
                self.say("no worker has started yet: the cluster may be busy")
        self._give_up_locked()
        for worker in self.open_workers:
            if worker.task is None and (found := self._next()):
                self._begin(worker, *found)
            elif worker.task is None and not self.waiting:
                self._remove(worker)  # frees its resources

    def _next(self) -> tuple[int, PlannedRun] | None:
        """Return the first run that can begin now."""
        if self.received:
            return None
        being_made = {self.groups[worker.task[0]] for worker in self._under_way if worker.task} - self.bases.keys()
        for number, run in self.waiting:
            # A lost worker's process may live a moment longer, or live on in a node that cannot be reached.
            if self.groups[number] not in being_made and not (number in self.losses and is_locked(run.folder)):
                return number, run
        return None

    def _give_up_locked(self) -> None:
        """Record a lost run as failed if its old process has kept the folder locked for longer than cluster.timeout."""
        for number, run in [each for each in self.waiting if each[0] in self.losses]:
            if not is_locked(run.folder):
                self.locked.pop(number, None)
            elif number not in self.locked:
                self.locked[number] = time.monotonic()
                self.session.on_run(number, run, "waits until its lost process unlocks its folder", "yellow")
            elif time.monotonic() > self.locked[number] + self.timeout:
                self.waiting.remove((number, run))
                reason = f"its lost process still locks {run.folder} after {self.timeout:g} s (cluster.timeout)"
                self.session.end(number, run, Outcome(failure=reason))

    def _begin(self, worker: _Place, number: int, run: PlannedRun) -> None:
        self.waiting.remove((number, run))
        if read_status(run.folder).is_done:  # finished by a worker that could not be reached
            self._end(worker, number, run, Outcome())
            return
        group = self.groups[number]
        if group not in self.bases and (base := recorded_base(run, self.session.plan)):
            self.bases[group] = base
        task = self.session.begin(number, run, self.bases.get(group), worker.node)
        worker.task, worker.has_begun = (number, run), False
        self._call(worker, worker.actor.train.remote(task), partial(self._hear, worker), has_timeout=False)

    def _hear(self, worker: _Place, news: Sequence[News]) -> None:
        assert worker.task is not None
        number, run = worker.task
        worker.has_begun = True
        for each in news:
            if isinstance(each, Outcome):
                worker.task = None
                self._end(worker, number, run, each)
                return
            if isinstance(each, Base):
                self.bases[self.groups[number]] = each
            elif isinstance(each, Line):
                self.session.on_run(number, run, each.text, each.style)
        self._call(worker, worker.actor.news.remote(), partial(self._hear, worker), has_timeout=False)

    def _end(self, worker: _Place, number: int, run: PlannedRun, outcome: Outcome) -> None:
        if outcome.signal is not None and not self.received:
            self._retry(number, run, f"the run on {worker.node} got signal {outcome.signal}")
        elif self.session.end(number, run, outcome) == Status.FINISHED:
            self.session.on_run(number, run, "finished", "bold")

    def _retry(self, number: int, run: PlannedRun, reason: str) -> None:
        """Count one loss of the run. Let it resume after the others; after too many losses, record it as failed."""
        try:
            self.losses.setdefault(number, Restarts(run.config.cluster.max_restarts)).spend(reason)
        except ClusterLost as error:
            self.session.end(number, run, Outcome(failure=str(error)))
        else:
            self.session.on_run(number, run, f"will resume: {reason}", "yellow")
            self.waiting.append((number, run))

    def _lose(self, worker: _Place, what: str) -> None:
        self._remove(worker)
        if self.received:
            return
        if worker.task is not None and worker.has_begun:
            self._retry(*worker.task, f"the worker on {worker.node} {what}")
            self.workers.append(self._opening(worker.slot))
            return
        if worker.task is not None:  # it may have died while idle, which is no fault of the run
            number, run = worker.task
            self.losses.setdefault(number, Restarts(run.config.cluster.max_restarts))
            self.waiting.insert(0, worker.task)
        if self._replaces(worker, what):
            self.events.append((EventKind.WORKER, f"another worker starts in place of one that {what}"))
            self.workers.append(self._opening(worker.slot))
        elif self.workers:
            self.events.append((EventKind.WORKER, f"one worker fewer: it {what}"))
        else:
            # At first this is a mistake of the user. Later the cluster has changed, and the ablation can be resumed.
            raise (ClusterLost if self.losses else ClusterError)(f"--ray: there is no worker, the last one {what}")

    def _replaces(self, worker: _Place, what: str) -> bool:
        """Return whether another worker starts in place of this idle one, up to cluster.max_restarts times.

        Ray may place a worker on a node whose death it has not noticed yet.
        """
        if not worker.is_dead or not self.waiting:
            return False
        try:
            self.restarts.spend(what)
        except ClusterLost:
            return False
        return True

    def _time_out(self, worker: _Place) -> None:
        """Give up a worker that did not open in time. No other call has a time limit."""
        self._lose(worker, f"did not start within {self.timeout:g} s (cluster.timeout), maybe because Ray is busy")

    def _remove(self, worker: _Place) -> None:
        self._kill(worker)
        self.workers.remove(worker)

    def _pass_signals_on(self) -> None:
        """Send new signals to the runs: on the first they finish their step and save, on the second they end.

        On the third the workers are killed, and their runs with them.
        """
        new = self.received[self.passed_on :]
        if not new:
            return
        self.passed_on += len(new)
        if self.session.signal is None:
            self.session.signal = new[0]
            self.say("stopping all runs after their current steps, then saving; press again to stop at once")
        for worker in [*self.workers]:
            if worker.task is None or signal.SIGKILL in new:
                self._remove(worker)
        for number in new:
            for worker in self._under_way:
                worker.actor.send_signal.remote(number)
