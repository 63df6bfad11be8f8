"""The worker's side of a pool: the pipes, a memory limit, and dying with the training process."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

from dapo.system.lifeline import die_with_parent

MAX_LINE = 2**20  # bytes


class Channel:
    """JSON lines over two pipes. Standard output is discarded; the pool keeps the tail of standard error."""

    def __init__(self, requests: int, answers: int, lifeline: int) -> None:
        faulthandler.enable()
        for fd in (requests, answers, lifeline):
            os.set_inheritable(fd, False)  # a program that a user's function starts must not keep the pipes open
        die_with_parent(lifeline)
        self.requests = os.fdopen(requests, "rb", buffering=0)
        self.answers = answers
        self.pid = os.getpid()
        self.unread = b""

    def receive(self) -> Any:
        """Return the next message, or None if the pool has closed the pipe."""
        while b"\n" not in self.unread:
            data = self.requests.read(2**16)
            if not data:
                return None
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def messages(self) -> Iterator[Any]:
        while (message := self.receive()) is not None:
            yield message

    def send(self, message: Any, if_too_long: Callable[[int], Any] | None = None) -> None:
        """Send a message. If it has more than MAX_LINE bytes, send `if_too_long(bytes)` instead."""
        if os.getpid() != self.pid:
            os._exit(0)  # a child that a user's function forked, and that returned from it
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_LINE and if_too_long is not None:
            data = json.dumps(if_too_long(len(data))).encode() + b"\n"
        while data:
            data = data[os.write(self.answers, data) :]


def end_worker() -> None:
    """Kill this process and everything it started: the pool has closed the pipe."""
    os.killpg(os.getpid(), signal.SIGKILL)


def limit_memory(gigabytes: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps
    if gigabytes > 0:
        limit = int(gigabytes * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def memory_hint(sentence: str, option: str, gigabytes: float) -> str:
    """Return a hint to append to the reason why a file cannot be loaded, if memory may be the cause."""
    is_memory = any(sign in sentence for sign in ("MemoryError", "failed to map", "Cannot allocate memory"))
    return f"; {option} is {gigabytes:g}, perhaps too little" if is_memory else ""
