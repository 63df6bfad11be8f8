"""A model of a disk with a page cache: its content if the power failed between two calls.

A killed process loses nothing that it wrote, because the page cache stays. A power cut loses whatever was not synced:
the bytes of a file since its last fsync, and the names in a folder (files created, renamed and deleted) since the last
fsync of that folder. The disk may have written any part of it by itself. The tests try the extremes:

- NOTHING: neither bytes nor names that were not synced;
- NAMES: all names, but no bytes that were not synced (a renamed file is then empty);
- BYTES: all bytes, but no names that were not synced.
"""

from __future__ import annotations

import copy
import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.interpose import Call


class Survives(enum.Enum):
    NOTHING = "nothing unsynced"
    NAMES = "names, not bytes"
    BYTES = "bytes, not names"
    ALL = "everything"


@dataclass(slots=True, eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(slots=True, eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """The content of one folder, `root`, which was empty and synced before the first call."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        self.by_inode: dict[int, File] = {}

    def apply(self, call: Call) -> None:
        match call.what:
            case "create":
                self._parent(call.path).names[call.path.name] = self.by_inode[call.inode] = File()
            case "mkdir":
                self._parent(call.path).names[call.path.name] = Folder()
            case "write":
                file = self.by_inode[call.inode]
                file.content.extend(bytes(max(0, call.offset - len(file.content))))
                file.content[call.offset : call.offset + len(call.data)] = call.data
            case "truncate":
                file = self.by_inode[call.inode]
                del file.content[call.offset :]
                file.content.extend(bytes(call.offset - len(file.content)))
            case "rename":
                self._parent(call.to).names[call.to.name] = self._parent(call.path).names.pop(call.path.name)
            case "unlink":
                del self._parent(call.path).names[call.path.name]
            case "sync":
                # Find a file by its inode: its name may have changed since it was opened.
                found = self.by_inode.get(call.inode) or self._find(call.path)
                if isinstance(found, File):
                    found.synced = bytes(found.content)
                else:
                    found.synced = dict(found.names)

    def content(self, survives: Survives = Survives.ALL) -> dict[str, bytes | None]:
        """Return every file with its bytes, and every folder with None, by path below the root."""
        found: dict[str, bytes | None] = {}

        def visit(folder: Folder, prefix: str) -> None:
            has_names = survives in (Survives.ALL, Survives.NAMES)
            for name, entry in (folder.names if has_names else folder.synced).items():
                if isinstance(entry, Folder):
                    found[prefix + name] = None
                    visit(entry, f"{prefix}{name}/")
                elif survives in (Survives.ALL, Survives.BYTES):
                    found[prefix + name] = bytes(entry.content)
                else:
                    found[prefix + name] = entry.synced

        visit(self.top, "")
        return found

    def _parent(self, path: Path) -> Folder:
        found = self._find(path.parent)
        assert isinstance(found, Folder)
        return found

    def _find(self, path: Path) -> File | Folder:
        found: File | Folder = self.top
        for part in path.relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.names[part]
        return found


def lay_out(content: dict[str, bytes | None], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        path = root / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def digest(content: dict[str, bytes | None]) -> str:
    total = hashlib.sha256()
    for name in sorted(content):
        data = content[name]
        total.update(f"{name}\0{'folder' if data is None else len(data)}\0".encode())
        total.update(data or b"")
    return total.hexdigest()


def without_shared_memory(content: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Return the content without -shm files: SQLite writes them through mmap, and rebuilds them after a crash."""
    return {name: data for name, data in content.items() if not name.endswith("-shm")}


def kills(calls: Sequence[Call], root: Path) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """Yield every distinct content of the disk after a kill before a call: (number of that call, content)."""
    disk, known = Disk(root), set()
    for number, call in enumerate(calls, 1):
        content = without_shared_memory(disk.content())
        if (key := digest(content)) not in known:
            known.add(key)
            yield number, content
        disk.apply(call)


def half_writes(calls: Sequence[Call], root: Path) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """Yield the same for a kill in the middle of a write."""
    disk, known = Disk(root), set()
    for number, call in enumerate(calls, 1):
        if call.what == "write" and len(call.data) > 1 and not call.path.name.endswith("-shm"):
            torn = copy.deepcopy(disk)
            torn.apply(replace(call, data=call.data[: len(call.data) // 2]))
            content = without_shared_memory(torn.content())
            if (key := digest(content)) not in known:
                known.add(key)
                yield number, content
        disk.apply(call)


def power_cuts(calls: Sequence[Call], root: Path) -> Iterator[tuple[int, Survives, dict[str, bytes | None]]]:
    """Yield every distinct content after a power cut: (number of calls made, what survived, content)."""
    disk, known = Disk(root), set()
    for number, call in enumerate(calls, 1):
        disk.apply(call)
        for survives in (Survives.NOTHING, Survives.NAMES, Survives.BYTES):
            content = without_shared_memory(disk.content(survives))
            if (key := digest(content)) not in known:
                known.add(key)
                yield number, survives, content
