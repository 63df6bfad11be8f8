"""Atomic files and folders: complete or absent, even if the process dies while writing."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from dapo.errors import DISK_FAULTS, StorageError, one_line

_LEFTOVER_AFTER = 24 * 3600.0  # seconds


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that is fsynced and renamed to `final` when the block ends without an error.

    If two processes write the same folder at once, the result of the first one stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
    except OSError as error:
        error.filename = str(final)  # the caller knows this name, not the temporary one
        raise
    try:
        with _disk_faults_explained(final):
            yield temporary
            sync_tree(temporary)
        try:
            temporary.rename(final)
        except OSError:  # another process was first
            if not final.is_dir():
                raise
        fsync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _disk_faults_explained(final: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        # shutil.copytree collects the errors of all files in one that has no number of its own.
        if isinstance(error, OSError) and not isinstance(error, shutil.Error) and error.errno not in DISK_FAULTS:
            raise
        first = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        reason = first.strerror if isinstance(first, OSError) else one_line(first)
        raise StorageError(f"{final}: cannot be written ({reason}); free some space or repair the disk") from error


def _remove_leftovers(final: Path) -> None:
    """Remove the temporary folders of killed processes, but not young ones, whose process may still be writing."""
    for path in final.parent.iterdir():
        if path.name.startswith(f".{final.name}."):
            with suppress(FileNotFoundError):  # its owner has renamed it
                if time.time() - path.stat().st_mtime > _LEFTOVER_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def draft(path: Path) -> Path:
    """Return the file that `write_text` writes before it renames it to `path`. A killed process leaves it behind."""
    return path.with_name(f".{path.name}")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old content or the new one, even after a power failure."""
    unfinished = draft(path)
    try:
        with _disk_faults_explained(path):
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            fsync(path.parent)
    except OSError as error:
        error.filename = str(path)  # the caller knows this name, not the draft's
        raise
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and directory entry below `folder` to disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            fsync(Path(root) / name)
        fsync(Path(root))


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
