"""A pipe that ties a child process to its parent."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent, which holds the other end of the pipe, dies.

    Nothing is ever written to the pipe. A thread that reads it might never get the interpreter lock, and a parent-death
    signal would spare the processes that this one started.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the parent process has exited")
