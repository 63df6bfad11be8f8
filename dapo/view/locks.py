"""Whether a process holds a run: asked without taking the lock, or a training that starts just now would be refused."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_TABLE = Path("/proc/locks")


def is_held(path: Path) -> bool:
    """Whether a living process has `path` locked (flock, exclusively), as the trainer does with a run's .lock."""
    try:
        wanted = path.stat()
    except OSError:
        return False
    try:
        table = _TABLE.read_text(encoding="ascii")
    except OSError:
        return _is_held_by_trying(path)
    for pid, device, inode in _exclusive_locks(table):
        # Some file systems (btrfs, overlays) give another device here than in stat: then the holder's files decide.
        if inode == wanted.st_ino and (device == wanted.st_dev or _has_open(pid, wanted)):
            return True
    return False


def _exclusive_locks(table: str) -> Iterator[tuple[int, int, int]]:
    """(process, device, inode) of each. A line that waits for a lock has an arrow in its second column."""
    for line in table.splitlines():
        columns = line.split()
        if columns[1:2] == ["FLOCK"] and columns[3] == "WRITE":
            major, minor, inode = columns[5].split(":")
            yield int(columns[4]), os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        return any(os.path.samestat(entry.stat(), wanted) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended, has just closed a file, or is somebody else's
        return False


def _is_held_by_trying(path: Path) -> bool:
    """Where the system has no table of locks: a shared one, for as short as can be."""
    try:
        # Without waiting, as opening a FIFO would.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), closefd=True) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
