"""Tell whether a process holds a run's lock, without taking the lock: taking it would refuse a training that starts."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_TABLE = Path("/proc/locks")


def is_held(path: Path) -> bool:
    """Return whether a live process holds an exclusive flock on `path`, as the trainer does on a run's .lock."""
    try:
        wanted = path.stat()
    except OSError:
        return False
    try:
        table = _TABLE.read_text(encoding="ascii")
    except OSError:
        return _is_held_by_trying(path)
    for pid, device, inode in _exclusive_locks(table):
        # Some file systems (btrfs, overlays) report another device here than in stat. Then check the holder's files.
        if inode == wanted.st_ino and (device == wanted.st_dev or _has_open(pid, wanted)):
            return True
    return False


def _exclusive_locks(table: str) -> Iterator[tuple[int, int, int]]:
    """Yield (process, device, inode) for each held lock. A waiting line has an arrow in its second column."""
    for line in table.splitlines():
        columns = line.split()
        if columns[1:2] == ["FLOCK"] and columns[3] == "WRITE":
            major, minor, inode = columns[5].split(":")
            yield int(columns[4]), os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        return any(os.path.samestat(entry.stat(), wanted) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # the process ended, just closed a file, or belongs to another user
        return False


def _is_held_by_trying(path: Path) -> bool:
    """Try a shared lock for an instant. Used only on systems without a table of locks."""
    try:
        # Non-blocking: opening a FIFO would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), closefd=True) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
