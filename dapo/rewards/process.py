"""A worker process as the pool sees it: non-blocking pipes, the reason it exited, and killing it with its children."""

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

MAX_UNREAD = 2**22  # bytes of one line; a worker sends at most a quarter of this
MAX_STDERR = 4096  # bytes kept
ROOMS = ("dapo/rewards", "dapo/environments")  # the frames of ours around a user's function

# The worker gets the training process's import path, so that a reward file can import what a training script can. It is
# not started with -m: the working directory would come first, and a file there named random.py would break imports.
_COMMAND = (
    "import sys; _, requests, answers, lifeline, *sys.path = sys.argv; "
    "from {module} import main; main(int(requests), int(answers), int(lifeline))"
)


def _environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # A fixed hash seed, because the order of sets depends on it: a reward must score alike in every worker.
    return {"PYTHONHASHSEED": "0", **one_thread, **os.environ}


class WorkerProcess:
    """A Python process that runs `main` of `module`.

    It does not use multiprocessing, which would run the user's script again (spawn) or copy a process with many threads
    (fork).
    """

    module = "dapo.rewards.worker"
    noun = "the judging process"  # for messages

    def __init__(self, setup: Mapping[str, Any]) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        command = _COMMAND.format(module=self.module)
        lifeline, self.lifeline = os.pipe()  # nothing is written to it; the worker dies when this end closes
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", command, *map(str, (requests, answers, lifeline)), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(requests, answers, lifeline),
                start_new_session=True,  # its own process group, killed with everything it started
                env=_environment(),
            )
        except OSError:
            for fd in (self.requests, self.answers, self.lifeline):
                os.close(fd)
            raise
        finally:
            for fd in (requests, answers, lifeline):
                os.close(fd)
        assert self.process.stderr is not None
        self.stderr = self.process.stderr.fileno()
        for fd in (self.requests, self.answers, self.stderr):
            os.set_blocking(fd, False)
        self.outgoing = to_json(setup).encode() + b"\n"
        self.unread = b""
        self.stderr_tail = b""
        self.is_disconnected = False
        self.fault: str | None = None

    def write(self) -> bool:
        """Write as much as the pipe accepts. Return whether bytes are left."""
        try:
            self.outgoing = self.outgoing[os.write(self.requests, self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # the exit is handled elsewhere, after its last messages are read
        return bool(self.outgoing)

    def read_lines(self) -> list[bytes]:
        """Return the complete lines received so far; keep the rest for the next call."""
        while not self.is_disconnected and len(self.unread) <= MAX_UNREAD:
            try:
                data = os.read(self.answers, 2**16)
            except BlockingIOError:
                break
            self.unread += data
            self.is_disconnected = not data
        *lines, self.unread = self.unread.split(b"\n")
        if len(self.unread) > MAX_UNREAD:
            self.fault = f"{self.noun} sent a line of more than {MAX_UNREAD} bytes"
        return lines

    def read_stderr(self) -> bool:
        """Read what is there and keep the tail. Return whether more may come."""
        try:
            data = os.read(self.stderr, 2**16)
        except BlockingIOError:
            return True
        self.stderr_tail = (self.stderr_tail + data)[-MAX_STDERR:]
        return bool(data)

    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def exit_reason(self) -> str | None:
        """Return how the process died and what it last printed, or None if it is alive."""
        try:
            code = self.process.wait(timeout=0.2)  # its pipes close shortly before it exits
        except subprocess.TimeoutExpired:
            return None
        for _ in range(16):  # 16 x 64 KiB empty the largest pipe; unbounded, a surviving child could write forever
            self.read_stderr()
        how = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        return f"{self.noun} died ({how}){_stderr_summary(self.stderr_tail.decode(errors='replace'))}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has exited and left no child
            os.killpg(self.process.pid, signal.SIGKILL)
        for fd in (self.requests, self.answers, self.lifeline):
            os.close(fd)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def reap(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds for the exit and return whether it came. A process can hang in the kernel."""
        try:
            self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def _stderr_summary(stderr: str) -> str:
    """Return the last line of standard error, or after a crash the outermost frame of the user's function."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(line.startswith("Fatal Python error") for line in lines):
        frames = [line for line in lines if line.startswith('File "')]
        lines = list(takewhile(lambda frame: not any(room in frame for room in ROOMS), frames))
    return f": {lines[-1][:200]}" if lines else ""
