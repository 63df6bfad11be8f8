"""Run programs of a model in processes that can do no harm, and report what they did.

A program is one process with at most `MAX_THREADS` threads. It has no network, sees no files but Python's own (read-
only) and an empty scratch directory, and is killed at its limits of time, memory and output. It starts as a fork of a
`zygote`, which has Python loaded and holds no secrets: not the tests, not the expected output, not the environment.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dapo.errors import RewardError
from dapo.rewards.sandbox.confine import LANDLOCK, NAMESPACES, NONE

Reason = Literal["wrong answer", "raised", "crashed", "timeout", "memory", "output", "threads"]

MAX_THREADS = 64
MAX_OUTPUT = 2**20  # bytes, beyond the length of the expected output
MEMORY = 2**30  # bytes of address space; more would let a few programs fill a laptop
WALL_FACTOR = 3.0  # the limit is CPU time; a program that sleeps, or waits for a busy machine, may take longer
START_TIMEOUT = 60.0  # seconds for the sandbox's own steps; longer means that it is broken
TICK = 0.02  # seconds between two looks at the number of threads
_SYSTEM_FILES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip

DESCRIPTIONS = {
    NAMESPACES: "programs run in namespaces of their own (files, network) behind a filter of system calls (seccomp)",
    LANDLOCK: "programs run behind Landlock (files) and a filter of system calls (seccomp), without scratch files",
    NONE: "programs run WITHOUT isolation (reward.code_unsafe): they can do everything that you can",
}
SAFE = (NAMESPACES, LANDLOCK)


class SandboxError(RuntimeError):
    """The sandbox itself failed, so the response cannot be judged."""


class Ending(NamedTuple):
    """The end of a program: `reason` is None if it ran to its end, and `detail` is for people."""

    output: bytes
    cpu: float  # seconds
    reason: Reason | None = None
    detail: str = ""


class Zygote:
    """The process that forks the programs, and the socket to it."""

    def __init__(self, kind: str, memory: int) -> None:
        paths = sysconfig.get_paths()
        libraries = {os.path.dirname(paths[name]) for name in ("stdlib", "platstdlib")}
        readable = sorted({*libraries, paths["purelib"], paths["platlib"], *_SYSTEM_FILES})
        script = Path(__file__).with_name("zygote.py")
        # Not started with the caller's environment, which may hold tokens. -S and -s leave out site-packages' hooks.
        command = [sys.executable, "-s", "-S", "-X", "utf8", str(script)]
        command += [kind, str(memory), paths["purelib"], *readable]
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": "/tmp"}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
        self.link, other = socket.socketpair()
        self.link.settimeout(START_TIMEOUT)
        with other:
            self.process = subprocess.Popen(
                command,
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
            )
        answer = self._receive(1024)
        if answer != b"ready":
            self.close()
            raise SandboxError(answer.decode(errors="replace"))

    def fork(self, cpu_seconds: int, descriptors: Sequence[int]) -> int:
        with _as_sandbox_error():
            socket.send_fds(self.link, [b"%d" % cpu_seconds], descriptors)
        return int(self._receive())

    def end(self, pid: int) -> tuple[int, float]:
        """Kill the child if it is alive, and return its exit code (negative: a signal) and CPU seconds."""
        with _as_sandbox_error():
            self.link.sendall(b"%d" % -pid)
        code, seconds = self._receive().split()
        return int(code), float(seconds)

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()

    def _receive(self, size: int = 64) -> bytes:
        with _as_sandbox_error():
            answer = self.link.recv(size)
        if not answer:
            raise SandboxError("the process that starts programs has died")
        return answer


class Child:
    """One confined process, the pipes to it, and what it wrote to each of them."""

    def __init__(self, stdin: bytes = b"") -> None:
        self.unsent = stdin
        self.pid, self.cpu_limit = 0, 0
        self.exit_code, self.cpu = 0, 0.0
        child_in, self.stdin = os.pipe()
        self.stdout, child_out = os.pipe()
        self.stderr, child_err = os.pipe()
        job, child_job = socket.socketpair()
        self.job, self.child_ends = job.detach(), [child_in, child_out, child_err, child_job.detach()]
        self.open = {self.stdin, self.stdout, self.stderr, self.job}
        self.received = {descriptor: bytearray() for descriptor in (self.stdout, self.stderr, self.job)}

    def start(self, zygote: Zygote, job: Mapping[str, Any], cpu: float, peer: int | None) -> None:
        """Fork, wait until the process has confined itself, and send it the job, which it reads before it runs it."""
        self.cpu_limit = math.ceil(cpu)
        self.pid = zygote.fork(self.cpu_limit, self.child_ends if peer is None else [*self.child_ends, peer])
        self._close_child_ends()
        link = socket.socket(fileno=os.dup(self.job))
        with link, _as_sandbox_error():
            link.settimeout(START_TIMEOUT)
            if not link.recv(1):
                self.read(self.stderr)
                raise SandboxError(f"a process could not be confined ({self.last_words()})")
            link.sendall(json.dumps(job).encode())
            link.shutdown(socket.SHUT_WR)
        for descriptor in self.open:
            os.set_blocking(descriptor, False)

    def write(self) -> bool:
        """Write to its standard input what the pipe accepts, and return whether something is left."""
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent[: 2**16]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = b""  # it does not want the rest
        return bool(self.unsent)

    def read(self, descriptor: int) -> bool:
        """Read what there is, and return whether more may come."""
        try:
            data = os.read(descriptor, 2**18)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self.received[descriptor] += data
        return bool(data)

    def has_too_many_threads(self) -> bool:
        # The kernel's own limit counts all processes of a user, and does not hold for root.
        with suppress(OSError):
            return os.stat(f"/proc/{self.pid}/task").st_nlink - 2 > MAX_THREADS
        return False

    def last_words(self) -> str:
        lines = self.received[self.stderr][-2000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def shut(self, descriptor: int) -> None:
        self.open.remove(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in [*self.open]:
            self.shut(descriptor)
        self._close_child_ends()

    def _close_child_ends(self) -> None:
        while self.child_ends:
            os.close(self.child_ends.pop())


class Children:
    """The processes of one run. Leaving the context kills them."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote
        self.children: list[Child] = []
        self.stopped: tuple[Reason, str] | None = None

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.close()
        for child in self.children:
            if child.pid:
                child.exit_code, child.cpu = self.zygote.end(child.pid)

    def start(self, job: Mapping[str, Any], cpu: float, stdin: bytes = b"", peer: int | None = None) -> Child:
        child = Child(stdin)
        self.children.append(child)
        child.start(self.zygote, job, cpu, peer)
        return child

    def attend(self, until: Sequence[int], max_output: int, wall: float) -> None:
        """Pass data both ways until the descriptors `until` have ended, or a limit is reached."""
        deadline, waiting = time.monotonic() + wall, set(until)
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.stdin, selectors.EVENT_WRITE, child)
                for descriptor in child.received:
                    selector.register(descriptor, selectors.EVENT_READ, child)
            while waiting and self.stopped is None:
                for key, _ in selector.select(TICK):
                    child, descriptor = key.data, key.fd
                    is_open = child.write() if descriptor == child.stdin else child.read(descriptor)
                    if not is_open:
                        selector.unregister(descriptor)
                        child.shut(descriptor)
                        waiting.discard(descriptor)
                    if any(len(data) > max_output for data in child.received.values()):
                        self.stopped = "output", f"it wrote more than {max_output} bytes"
                if any(child.has_too_many_threads() for child in self.children):
                    self.stopped = "threads", f"it started more than {MAX_THREADS} threads"
                elif time.monotonic() > deadline:
                    self.stopped = "timeout", f"it ran for more than {wall:g} s"

    def ending(self, child: Child) -> Ending:
        code, words = child.exit_code, child.last_words()
        output, cpu = bytes(child.received[child.stdout]), sum(child.cpu for child in self.children)
        if self.stopped is not None:
            return Ending(output, cpu, *self.stopped)
        if code == -signal.SIGXCPU or child.cpu > child.cpu_limit:
            return Ending(output, cpu, "timeout", f"it used more than {child.cpu_limit} s of CPU time")
        if code < 0:
            return Ending(output, cpu, "crashed", f"{signal.strsignal(-code)}")
        if code > 0:
            return Ending(output, cpu, "memory" if words.startswith("MemoryError") else "raised", words)
        return Ending(output, cpu)


class Sandbox:
    """Runs programs, one at a time. The zygote starts with the first of them, and again if it is lost."""

    def __init__(self, *, memory_gb: float = 0.0, is_unsafe_allowed: bool = False, kinds: Sequence[str] = SAFE) -> None:
        self.memory = min(MEMORY, int(memory_gb * 2**30) or MEMORY)
        self.kinds = [*kinds, *([NONE] if is_unsafe_allowed else [])]
        self.zygote: Zygote | None = None
        self.isolation = ""

    def open(self) -> Zygote:
        """Return the zygote, with the best isolation that works here."""
        failures: list[str] = []
        for kind in self.kinds if self.zygote is None else ():
            zygote = None
            try:
                zygote = Zygote(kind, self.memory)
                with Children(zygote) as children:  # tries every step of the confinement
                    children.start({"role": "script", "source": ""}, 10)
            except SandboxError as error:
                failures.append(f"{kind}: {error}")
                if zygote is not None:
                    zygote.close()
                continue
            self.zygote, self.kinds, self.isolation = zygote, [kind], kind  # a later restart must not be weaker
            break
        if self.zygote is None:
            raise RewardError(
                f"programs need a sandbox, and this machine offers none ({'; '.join(failures)}); allow user "
                "namespaces or Landlock, or set reward.code_unsafe to run programs without isolation"
            )
        return self.zygote

    def close(self) -> None:
        if self.zygote is not None:
            self.zygote.close()
            self.zygote = None

    def run_script(self, source: str, stdin: str, expected: int, cpu: float, wall: float) -> Ending:
        """Run a program with this standard input. `expected` is the length of the output that is expected."""
        with self._children() as children:
            child = children.start({"role": "script", "source": source}, cpu, stdin.encode(errors="replace"))
            children.attend([child.stdout, child.stderr], expected + MAX_OUTPUT, wall)
        return children.ending(child)

    def run_tests(self, source: str, tests: Mapping[str, Any], cpu: float, wall: float) -> tuple[list[Any], Ending]:
        """Run tests that call the program's functions; return one result per test that ended, and the program's end.

        `tests` has the setup, the tests and the names that must be the program's (see `calls.check`).
        """
        with self._children() as children:
            ours, theirs = socket.socketpair()
            with ours, theirs:  # closed here, so that the connection ends when one of the processes does
                program = children.start({"role": "functions", "source": source}, cpu, peer=ours.fileno())
                checker = children.start({"role": "tests", **tests}, cpu, peer=theirs.fileno())
            children.attend([checker.job], MAX_OUTPUT, wall)
        if program.exit_code == -signal.SIGKILL:
            program.exit_code = 0  # it was still there at the end of the tests
        *lines, _ = bytes(checker.received[checker.job]).split(b"\n")  # whole lines
        results = [json.loads(line) for line in lines]
        return results, children.ending(program)

    @contextmanager
    def _children(self) -> Iterator[Children]:
        try:
            with Children(self.open()) as children:
                yield children
        except SandboxError:
            self.close()  # the next program gets a new zygote
            raise


@contextmanager
def _as_sandbox_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SandboxError(f"the process that starts programs does not answer ({error})") from None
