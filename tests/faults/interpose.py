"""Counts, records and breaks the calls by which a process changes files; the library is interpose.c."""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).with_name("interpose.c")
_HEADER = struct.Struct("=c5Q")


class Mode(enum.IntEnum):
    """The fault at the chosen call; the numbers are those of interpose.c."""

    WATCH = 0
    KILL = 1
    KILL_HALFWAY = 2
    DISK_FULL = 3
    IO_ERROR = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One call that changed a file.

    `what` is write, truncate, sync, create, rename, unlink (also of folders), mkdir, or failed: a call that changed
    nothing, for example because its folder did not exist.
    """

    what: str
    path: Path
    to: Path
    inode: int
    offset: int
    data: bytes


_NAMES = {
    b"w": "write", b"t": "truncate", b"s": "sync", b"c": "create", b"r": "rename", b"u": "unlink", b"m": "mkdir",
    b"x": "failed",
}  # fmt: skip


def has_compiler() -> bool:
    return shutil.which("cc") is not None


def build(folder: Path) -> Path:
    library = folder / "interpose.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True)
    return library


def arm(below: Path, mode: Mode = Mode.WATCH, at: int = 0, log: Path | None = None) -> None:
    """Watch the files below `below`, and apply the fault at call number `at`; the library must be preloaded."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    text = None if log is None else os.fsencode(log)
    library.faults_arm(os.fsencode(below), ctypes.c_int(mode), ctypes.c_long(at), text)


def read_log(log: Path) -> list[Call]:
    return list(_calls(log.read_bytes()))


def _calls(content: bytes) -> Iterator[Call]:
    place = 0
    while place < len(content):
        what, path_length, to_length, inode, offset, data_length = _HEADER.unpack_from(content, place)
        place += _HEADER.size
        ends = [place, place + path_length, place + path_length + to_length]
        ends.append(ends[-1] + data_length)
        path, to, data = (content[start:end] for start, end in pairwise(ends))
        yield Call(_NAMES[what], Path(os.fsdecode(path)), Path(os.fsdecode(to)), inode, offset, data)
        place = ends[-1]
