"""The judge protocol over Ray actors: dispatch groups to reward workers, and judge the groups of lost ones again."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dapo.cluster.supervisor import Rules, Supervisor, Worker
from dapo.config import REWARD_TOKEN, RewardConfig
from dapo.rewards.function import JUDGE_CLOSED, unjudged
from dapo.rewards.judge import build_judge, max_concurrent_groups
from dapo.types import EventKind, Prompt, Rollout, Score

PULSE = 2.0  # seconds between pings of a worker


class RewardWorker:
    """A Ray actor with the same judge as a local run. The judge handles timeouts and crashes of reward functions."""

    def open(self, options: str, folder: str, token: str | None) -> None:
        if token is not None:  # actors do not inherit the driver's environment
            os.environ[REWARD_TOKEN] = token
        with suppress(OSError):  # no such folder on this node: stay in the job's copy of the working directory
            os.chdir(folder)
        self.own = build_judge(RewardConfig.model_validate_json(options))

    def judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.own.submit(prompt, rollouts).result()


class _Scores(Future[list[Score]]):
    """A future that reports events while its caller waits, because only that thread may write to the run's database."""

    def __init__(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__()
        self.wait = wait
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> list[Score]:
        end = math.inf if timeout is None else time.monotonic() + timeout
        self.wait(lambda: self.done() or time.monotonic() >= end)
        return super().result(0)


@dataclass(slots=True, eq=False)
class _Group:
    prompt: Prompt
    rollouts: Sequence[Rollout]
    scores: _Scores


@dataclass(slots=True, eq=False)
class _Worker(Worker):
    next_ping: float = math.inf  # by time.monotonic(); inf while one is pending
    groups: list[_Group] = field(default_factory=list)


class RemoteJudge(Supervisor[_Worker]):
    """The judge protocol over `count` actors that `start(slot, concurrency)` creates.

    A worker gets only as many groups as keep it busy; the others wait in `queue`. Judging may take any time, so dead
    workers are found by pings. A future fails only if the run cannot continue: after a user's mistake, or with
    `ClusterLost`.
    """

    role, loss_event, work = "reward worker", EventKind.REWARD_WORKER, "judged"

    def __init__(self, start: Callable[[int, int], Any], count: int, options: RewardConfig, rules: Rules) -> None:
        super().__init__(rules)
        options = options.model_copy(update={"workers": options.workers or 1})
        self.start, self.limit = start, max_concurrent_groups(options)
        self.opening = options.model_dump_json(), os.getcwd(), os.environ.get(REWARD_TOKEN)
        self.queue: deque[_Group] = deque()
        self._open_all(count, "Starting")

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        self._attend()
        group = _Group(prompt, rollouts, _Scores(self._wait))
        with self.changed:
            if self.is_closing:
                self._give_up(group)
            else:
                self.queue.append(group)
                self._dispatch()
        return group.scores

    def close(self) -> None:
        """Resolve all open futures and kill the workers."""
        self._stop_thread()
        for group in [*self.queue, *(group for worker in self.workers for group in worker.groups)]:
            self._give_up(group)
        self.queue.clear()
        super().close()

    def _give_up(self, group: _Group) -> None:
        if self.failure is not None:
            group.scores.set_exception(self.failure)
        else:
            group.scores.set_result([unjudged(JUDGE_CLOSED)] * len(group.rollouts))

    def _start(self, slot: int) -> tuple[_Worker, Any]:
        actor = self.start(slot, self.limit + 1)  # one more for pings
        return _Worker(slot, actor), actor.open.remote(*self.opening)

    def _opened(self, worker: _Worker, answer: Any) -> None:
        worker.is_open, worker.next_ping = True, time.monotonic() + PULSE

    def _dispatch(self) -> None:
        """Assign the oldest groups to the least loaded workers, and ping the workers that are due."""
        while self.queue and (free := [worker for worker in self.open_workers if len(worker.groups) < self.limit]):
            worker, group = min(free, key=lambda worker: (len(worker.groups), worker.slot)), self.queue.popleft()
            worker.groups.append(group)
            call = worker.actor.judge.remote(group.prompt, group.rollouts)
            self._call(worker, call, partial(self._deliver, worker, group), has_timeout=False)
        for worker in self.open_workers:
            if worker.next_ping < time.monotonic():
                worker.next_ping = math.inf
                self._call(worker, worker.actor.__ray_ready__.remote(), partial(self._opened, worker))

    def _deliver(self, worker: _Worker, group: _Group, scores: list[Score]) -> None:
        worker.groups.remove(group)
        group.scores.set_result(scores)

    def _requeue(self, worker: _Worker) -> int:
        self.queue.extendleft(reversed(worker.groups))
        return len(worker.groups)
