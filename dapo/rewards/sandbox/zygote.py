"""Start confined processes by fork, from a process that has Python loaded and knows nothing about rows or answers.

It is run by path, so that it need not import dapo, and gets requests over a socket (see `sandbox.Zygote`):

- A number of seconds and 4 or 5 descriptors: fork. The child gets the descriptors as 0 to 4 and runs one job; the
  reply is its process id.
- A negative process id: kill that child; the reply is its exit status and CPU time.

A child confines itself, writes a byte to descriptor 3 (the job) to say so, and only then reads what it has to run: what
a program does later cannot look like a failure of the sandbox.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress

from calls import check, serve  # pyright: ignore[reportMissingImports]  # found beside this file
from confine import Confinement  # pyright: ignore[reportMissingImports]

JOB, PEER = 3, 4
# Imported once, before the forks, because most programs want some of them.
_COMMON = "bisect collections copy dataclasses datetime decimal fractions functools heapq itertools math operator re"
_COMMON += " string typing"


def main() -> None:
    kind, memory, packages, *readable = sys.argv[1:]
    link = socket.socket(fileno=0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, programs are killed and not the training process
    for name in _COMMON.split():
        importlib.import_module(name)
    sys.path[:] = [*(path for path in sys.path if path != os.path.dirname(__file__)), packages]
    sys.set_int_max_str_digits(0)
    builtins.exit = builtins.quit = sys.exit  # of `site`, which is not imported; many scripts end with exit()
    try:
        confinement = Confinement(kind, readable, int(memory))
    except OSError as error:
        link.sendall(f"{error.strerror or error}".encode())
        return
    gc.collect()
    gc.freeze()  # what a collection in a child does not touch need not be copied for it
    link.sendall(b"ready")
    job = _forked_job(link, confinement)
    if job is not None:
        os._exit(run(job))


def _forked_job(link: socket.socket, confinement: Confinement) -> dict[str, object] | None:
    """Serve requests. Return None when the other end is closed, and in every child its job."""
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 64, 5)
        if not message:
            for pid in children:
                os.killpg(pid, signal.SIGKILL)
            return None
        number = int(message)
        if number >= 0:
            pid = os.fork()
            if pid == 0:
                return _become_child(link, confinement, descriptors, number)
            for descriptor in descriptors:
                os.close(descriptor)
            children.add(pid)
            link.sendall(b"%d" % pid)
        else:
            children.discard(-number)
            with suppress(ProcessLookupError, PermissionError):  # before its setpgid: no program is running in it yet
                os.killpg(-number, signal.SIGKILL)
            os.kill(-number, signal.SIGKILL)
            _, status, usage = os.wait4(-number, 0)
            link.sendall(b"%d %f" % (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))


def _become_child(link: socket.socket, confinement: Confinement, descriptors: list[int], cpu: int) -> dict[str, object]:
    link.detach()
    os.setpgid(0, 0)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    confinement.apply(cpu)
    os.closerange(len(descriptors), 1024)
    os.write(JOB, b".")
    with open(JOB, "rb", closefd=False) as file:
        return json.loads(file.read())


def run(job: dict[str, object]) -> int:
    """Run the tests, or a program: as a script, or one whose functions the tests in another process call.

    Return the exit code. The steps of a regular exit are made here, without the last one: to free all memory takes
    Python longer than everything else.
    """
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if job["role"] == "tests":
        return _exit_code(lambda: check(job, PEER, JOB))
    code = _exit_code(lambda: _run_program(str(job["source"]), str(job["role"])))
    return _exit_code(_finish) or code


def _exit_code(step: Callable[[], None]) -> int:
    try:
        step()
    except SystemExit as end:
        return 0 if end.code is None else end.code & 255 if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _finish() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        if file is not None and not file.closed:
            file.flush()


def _run_program(source: str, role: str) -> None:
    os.close(JOB)
    random.seed(0)
    # A script runs its `if __name__ == "__main__"`; where tests call functions, that part would wait for input.
    module = types.ModuleType("__main__" if role == "script" else "program")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), module.__dict__)
    if role == "functions":
        serve(module.__dict__, PEER)


if __name__ == "__main__":
    main()
