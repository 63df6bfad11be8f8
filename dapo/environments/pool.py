"""Run environments in worker processes, so that one that hangs, crashes or leaks memory ends only its own episode.

The state of an episode is in one worker. If that worker dies because of another episode, or is killed from outside, the
episode's turns are repeated in another worker, where the environment must give the same replies.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from dapo.config import Config
from dapo.environments.environment import USE, to_messages
from dapo.environments.protocol import ROW_PROMPT, Episode, Message, Reply, ToolCall
from dapo.errors import EpisodeError
from dapo.rewards.function import to_json, unjudged
from dapo.rewards.pool import read_score
from dapo.rewards.process_pool import PooledProcess, ProcessPool, pool_size
from dapo.rewards.thought import split_thought
from dapo.types import Prompt

CLOSED = "the environments were closed before this reply"
GRACE = 1.0  # seconds: async environments enforce the timeout themselves, so their worker is killed only after this
MAX_TIMEOUTS = 2  # per worker, of an environment that has never replied
MAX_CALLS = 64  # concurrent calls of async environments in one worker

Action = Literal["first", "reply", "cut_off"]


@dataclass(slots=True, eq=False)
class _State:
    """An episode, with everything needed to repeat it in another worker."""

    key: str
    row: Mapping[str, Any]
    first: Sequence[Message]
    opens_thought: bool = False  # the chat template opens a thought for the model
    turns: list[tuple[str, Sequence[Message]]] = field(default_factory=list)  # the model's texts and the replies
    worker: _Worker | None = None  # holds the episode's state


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    do: Action
    state: _State
    text: str
    is_last: bool
    future: Future[Any] = field(default_factory=Future)
    is_retry: bool = False  # a worker died while this was its only call
    is_alone: bool = False  # one of several calls of a lost worker; retried alone to find the one at fault
    deadline: float = math.inf

    def fail(self, reason: str) -> None:
        if self.do == "first":
            self.future.set_exception(EpisodeError(f"{USE}: {reason}"))
        else:
            self.future.set_result(Reply(ended=True, score=unjudged(reason)))


class _Worker(PooledProcess):
    module = "dapo.environments.worker"
    noun = "the environment's process"

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.queue: deque[_Call] = deque()
        self.calls: dict[int, _Call] = {}  # sent, by number
        self.states: set[_State] = set()

    def has_room(self, most: int) -> bool:
        """Return whether the next call in the queue can be sent now."""
        if not self.queue or not self.calls:
            return bool(self.queue)
        is_alone = self.queue[0].is_alone or any(call.is_alone for call in self.calls.values())
        return not is_alone and len(self.calls) < most

    def load(self) -> tuple[int, int]:
        return len(self.queue) + len(self.calls), len(self.states)

    def set_deadline(self) -> None:
        self.deadline = min((call.deadline for call in self.calls.values()), default=math.inf)


class WorkerEnvironments(ProcessPool[_Worker]):
    """The EnvironmentPool of a run. An episode is assigned to a worker with its first turn."""

    error, closed_reason = EpisodeError, CLOSED

    def __init__(self, config: Config) -> None:
        options = config.environment
        size = pool_size(options.workers, "environment.workers", self.error)
        super().__init__(size, "dapo-environments", f"{USE}: {options.use}")
        self.timeout, self.max_turns = options.timeout, options.max_turns
        self.setup = {"options": options.model_dump_json(), "unsafe": config.reward.code_unsafe}
        self.think_tags, self.reads_thoughts = config.reward.think_tags, True
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.most_calls, self.patience, self.grace = 1, 1.0, 0.0
        self.has_replied, self.timeouts = False, 0  # in any episode; calls that timed out before
        self.states: dict[Episode, _State] = {}
        self.inbox: deque[_Call] = deque()
        self.ended: list[_State] = []
        self.numbers = count()
        self._open()

    def first_messages(self, prompt: Prompt) -> Future[tuple[Message, ...]]:
        return self._submit("first", _State("", _row(prompt), ()), "", is_last=False)

    def start(self, episode: Episode, prompt: Prompt) -> None:
        with self.lock:
            key = f"{episode[0]}-{episode[1]}"
            self.states[episode] = _State(key, _row(prompt), prompt.messages, prompt.opens_thought)

    def reply(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        state = self.states[episode]
        if not self.reads_thoughts:
            text = split_thought(text, self.think_tags, state.opens_thought).reply or ""
        return self._submit("reply", state, text, is_last=turn >= self.max_turns)

    def cut_off(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        return self._submit("cut_off", self.states[episode], text, is_last=True)

    def waiting_for(self) -> str:
        starting = sum(not worker.is_ready for worker in [*self.workers])
        return f"the environment{f' ({starting} of its processes starting)' if starting else ''}"

    def end(self, episode: Episode) -> None:
        with self.lock:
            if (state := self.states.pop(episode, None)) is not None and not self.closing:
                self.ended.append(state)
                self._wake()

    def _submit(self, do: Action, state: _State, text: str, *, is_last: bool) -> Future[Any]:
        call = _Call(next(self.numbers), do, state, text, is_last)
        call.future.set_running_or_notify_cancel()  # it can no longer be canceled
        with self.lock:
            is_open = not self.closing
            if is_open:
                self.inbox.append(call)
                self._wake()
        if not is_open:
            call.fail(CLOSED)
        return call.future

    # Overrides of the process pool

    def _new_worker(self) -> _Worker:
        return _Worker(self.setup)

    def _has_work(self) -> bool:
        return bool(self.inbox)

    def _on_ready(self, properties: Mapping[str, Any]) -> None:
        self.tools, self.patience = tuple(properties["tools"]), float(properties["patience"])
        self.reads_thoughts = bool(properties["reads_thoughts"])
        if properties["is_async"]:
            self.most_calls, self.grace = MAX_CALLS, GRACE

    def _give_up(self, lost: Sequence[_Worker], reason: str) -> None:
        with self.lock:
            calls, self.inbox = [*self.inbox], deque()
        for worker in lost:
            calls += [*worker.queue, *worker.calls.values()]
        for call in calls:
            call.fail(reason)

    def _assign(self) -> None:
        """Send each call to the worker that has its episode. New episodes go to the worker with the fewest calls."""
        ready = [worker for worker in self.workers if worker.is_ready]
        if not ready:
            return
        with self.lock:
            calls, self.inbox = self.inbox, deque()
            ended, self.ended = self.ended, []
        for call in calls:
            worker = call.state.worker or min(ready, key=_Worker.load)
            if call.do != "first":
                call.state.worker = call.state.worker or worker
            worker.queue.append(call)
        for state in ended:
            if state.worker is not None:
                state.worker.states.discard(state)
                state.worker.outgoing += _line({"end": state.key})
        for worker in ready:
            while worker.has_room(self.most_calls):
                self._send(worker, worker.queue.popleft())
            if worker.outgoing:
                self._write(worker)

    def _send(self, worker: _Worker, call: _Call) -> None:
        state = call.state
        message = {"number": call.number, "do": call.do, "episode": state.key, "is_last": call.is_last}
        replayed = 0
        if call.do == "first":
            message["row"] = state.row
        elif state not in worker.states:
            message |= {"row": state.row, "first": state.first, "turns": state.turns}
            replayed = 1 + len(state.turns)
            worker.states.add(state)
        if call.do == "reply":
            message["text"] = call.text
        worker.outgoing += _line(message)
        worker.calls[call.number] = call
        call.deadline = time.monotonic() + self.timeout * self.patience * (1 + replayed) + self.grace
        worker.set_deadline()

    def _on_message(self, worker: _Worker, message: object) -> None:
        match message:
            case [int(number), {"seconds": float(seconds)} as result] if number in worker.calls:
                call = worker.calls[number]
                reply = self._reply(result, seconds)
                if call.do == "reply" and reply.ended:
                    reply = replace(reply, is_out_of_turns=result.get("is_cut_off") is True)
            case _:
                raise ValueError
        del worker.calls[number]
        worker.set_deadline()
        if call.do != "first":
            self.has_replied = True
            if reply.messages:
                call.state.turns.append((call.text, reply.messages))
            call.future.set_result(reply)
        elif reply.score is not None:
            call.fail(reply.score.error or "the episode ended before its first turn")
        else:
            call.future.set_result(reply.messages)

    def _reply(self, result: Mapping[str, Any], seconds: float) -> Reply:
        """Validate a worker's message, because an environment could write into the pipe to forge scores."""
        calls, reward = tuple(ToolCall(**call) for call in result.get("calls", ())), result.get("reward")
        if reward is not None and not (isinstance(reward, float) and math.isfinite(reward)):
            raise ValueError
        rest = {"seconds": seconds, "calls": calls, "reward": reward}
        match result:
            case {"error": str(reason)}:
                return Reply(ended=True, score=unjudged(reason), seconds=seconds)
            case {"score": None}:
                return Reply(ended=True, **rest)
            case {"score": [value, acc, error, dict(extras)]}:
                return Reply(ended=True, score=read_score(value, acc, error, extras), **rest)
            case {"messages": list(messages)}:
                return Reply(to_messages(messages, is_first=True), **rest)
        raise ValueError

    def _on_loss(self, worker: _Worker, reason: str | None) -> None:
        """Retry several calls one by one. Blame a single call if it timed out, or if its worker died twice."""
        for state in worker.states:
            state.worker = None
        for call in (*worker.queue, *worker.calls.values()):
            call.state.worker = None
        again: list[_Call] = []
        for call in worker.calls.values():
            if len(worker.calls) > 1:
                call.is_alone = True
            elif reason is None or call.is_retry:
                call.fail(reason or f"timed out after {self.timeout * self.patience:g} s")
                self.timeouts += reason is None
                continue
            else:
                call.is_retry = True
            again.append(call)
        with self.lock:
            self.inbox.extendleft(reversed([*again, *worker.queue]))
        if not worker.calls:
            self.target_size -= 1  # it died while idle: a new one is started only when there is work
        if not self.has_replied and self.timeouts >= MAX_TIMEOUTS * self.size:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Fail the calls that wait, because an environment that has never replied would hang in each of them, too."""
        reason = f"not asked, because the environment has not replied so far and {self.timeouts} calls timed out"
        self.timeouts = 0  # later calls are tried again
        with self.lock:
            waiting, self.inbox = [*self.inbox], deque()
        for worker in self.workers:
            waiting += worker.queue
            worker.queue.clear()
        for call in waiting:
            call.fail(reason)


def build_environment(config: Config) -> WorkerEnvironments | None:
    """Start the processes of the run's environment; return None if its responses are single turns."""
    return None if config.environment.use is None else WorkerEnvironments(config)


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return the row as environments see it."""
    extra = dict(prompt.extra)
    own: Iterable[Message] = extra.pop(ROW_PROMPT, prompt.messages)
    return {**extra, "prompt": list(own), "answer": prompt.answer, "data_source": prompt.data_source}


def _line(message: Mapping[str, Any]) -> bytes:
    return to_json(message).encode() + b"\n"
