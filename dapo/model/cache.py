"""The folder for fetched and converted models: whatever lies there under its final name is complete."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from dapo.errors import DISK_FAULTS, StorageError

_LEFTOVER_AFTER = 24 * 3600.0


def cache_dir() -> Path:
    if own := os.environ.get("DAPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dapo"


@contextmanager
def published(final: Path) -> Iterator[Path]:
    """A temporary folder that is fsynced and renamed to `final` when the block ends well.

    Of two processes that make the same thing at once, the first one's result stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        with _explained(final):
            yield temporary
            sync_tree(temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        fsync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _explained(final: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in DISK_FAULTS:
            raise
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StorageError(f"{final}: cannot be written ({reason}); free some space or repair the disk") from error


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Say what is going on: a spinner with a clock on a terminal, elsewhere one line if it takes over two seconds."""
    console = Console(file=sys.stderr)
    # Under somebody else's live display a second one would garble both; a line goes above it.
    if console.is_terminal and not isinstance(sys.stderr, FileProxy):
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(escape(message), total=None)
            yield
        return
    timer = threading.Timer(2.0, console.print, [escape(message) + " ..."], {"soft_wrap": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _remove_leftovers(final: Path) -> None:
    """Sweep up after processes that were killed; the age spares those still at work."""
    for path in final.parent.iterdir():
        if path.name.startswith(f".{final.name}."):
            with suppress(FileNotFoundError):  # renamed by its owner meanwhile
                if time.time() - path.stat().st_mtime > _LEFTOVER_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file all or nothing: whoever reads it finds the old content or the new one, also after a power cut."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    fsync(path.parent)


def sync_tree(folder: Path) -> None:
    """Have the disk hold every file and directory entry below `folder`."""
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
