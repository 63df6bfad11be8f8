"""A judging process as the pool sees it: pipes that never block, its last words, and a sure end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

from dapo.rewards.function import to_json

MAX_UNREAD = 2**22  # of one line; a worker sends at most a quarter of it
MAX_STDERR = 4096

# With the training process's own import path, so that a reward file can import what a training script can. As a module
# (-m) the working directory would come first, and a file there called random.py would break every import.
_COMMAND = (
    "import sys; _, requests, answers, life, *sys.path = sys.argv; "
    "from dapo.rewards.worker import main; main(int(requests), int(answers), int(life))"
)


def _environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Sets iterate in the order of their hashes: without a seed, a reward that uses them differs from worker to worker.
    return {"PYTHONHASHSEED": "0", **one_thread, **os.environ}


class WorkerProcess:
    """Not multiprocessing, which would run the user's script again, or fork a process full of threads."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        life, self.life = os.pipe()  # nothing is written to it: its end is the message
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, *map(str, (requests, answers, life)), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(requests, answers, life),
                start_new_session=True,  # a group of its own, to be killed with all it has started
                env=_environment(),
            )
        except OSError:
            for fd in (self.requests, self.answers, self.life):
                os.close(fd)
            raise
        finally:
            for fd in (requests, answers, life):
                os.close(fd)
        assert self.process.stderr is not None
        self.stderr = self.process.stderr.fileno()
        for fd in (self.requests, self.answers, self.stderr):
            os.set_blocking(fd, False)
        self.outgoing = to_json(setup).encode() + b"\n"
        self.unread = b""
        self.heard = b""
        self.is_cut_off = False
        self.fault: str | None = None

    def write(self) -> bool:
        """Whether something is left to write."""
        try:
            self.outgoing = self.outgoing[os.write(self.requests, self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # that it is gone shows elsewhere, after all it has said is read
        return bool(self.outgoing)

    def read_lines(self) -> list[bytes]:
        while not self.is_cut_off and len(self.unread) <= MAX_UNREAD:
            try:
                data = os.read(self.answers, 2**16)
            except BlockingIOError:
                break
            self.unread += data
            self.is_cut_off = not data
        *lines, self.unread = self.unread.split(b"\n")
        if len(self.unread) > MAX_UNREAD:
            self.fault = "the judging process sent an endless line"
        return lines

    def read_stderr(self) -> bool:
        """Keep the end of it; whether more may come."""
        try:
            data = os.read(self.stderr, 2**16)
        except BlockingIOError:
            return True
        self.heard = (self.heard + data)[-MAX_STDERR:]
        return bool(data)

    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str | None:
        """How it died and what it said, or None if it lives."""
        try:
            code = self.process.wait(timeout=0.2)  # its pipes close a moment before
        except subprocess.TimeoutExpired:
            return None
        for _ in range(16):  # a pipe holds no more, and a child that lives on may never stop
            self.read_stderr()
        how = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        return f"the judging process died ({how}){_said(self.heard.decode(errors='replace'))}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it may be dead, and have left nobody
            os.killpg(self.process.pid, signal.SIGKILL)
        for fd in (self.requests, self.answers, self.life):
            os.close(fd)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def reap(self, patience: float = 0.0) -> bool:
        """Whether it is gone for good: one that hangs in the kernel takes its time."""
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            return False
        return True


def _said(stderr: str) -> str:
    """After a crash the place in the reward, otherwise the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(line.startswith("Fatal Python error") for line in lines):
        places = [line for line in lines if line.startswith('File "')]
        lines = list(takewhile(lambda place: "dapo/rewards" not in place, places))
    return f": {lines[-1][:200]}" if lines else ""
