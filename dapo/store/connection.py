"""Opening run.db, and saying in one sentence what is wrong with it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dapo.errors import CheckpointError, StorageError
from dapo.store.schema import APPLICATION_ID, SCHEMA_VERSION


@contextmanager
def connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection that is closed again when what follows fails."""
    if mode != "rwc" and not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no run database here")
    with explained(path, "opened as a run database", writes=mode.startswith("rw")):
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=60,
            isolation_level=None,
            check_same_thread=False,  # a thread may write while another waits for it
        )
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys = ON")
            # A killed process loses nothing at NORMAL either. FULL adds one fsync per step, little beside the seconds
            # that a step takes, and so even a power cut cannot leave the database behind the checkpoint.
            connection.execute("PRAGMA synchronous = FULL")
            yield connection
        except BaseException:
            connection.close()
            raise


def reading_mode(path: Path) -> str:
    """A reader makes the WAL's index beside the file. Where it cannot, and no WAL is left, it needs none."""
    needs_index = os.access(path.parent, os.W_OK) or Path(f"{path}-wal").exists()
    return "ro" if needs_index else "ro&immutable=1"


def check(connection: sqlite3.Connection, path: Path) -> None:
    if is_blank(connection):
        raise CheckpointError(f"{path}: is empty; the run never started, or the file was copied without its -wal file")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise CheckpointError(f"{path}: is an SQLite database, but not that of a run")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{path}: has schema version {version}, but this version of dapo reads {SCHEMA_VERSION}")


def is_blank(connection: sqlite3.Connection) -> bool:
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return objects == 0


@contextmanager
def explained(path: Path, doing: str, *, writes: bool = False) -> Iterator[None]:
    """What a user can mend (a damaged file, a full disk, no permission) becomes one sentence; a bug goes through.

    Where the disk failed while writing, SQLite has undone the transaction, so the run can resume.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError) and type(error) is not sqlite3.DatabaseError:
            raise
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if writes and code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StorageError(
                f"{path}: cannot be {doing} ({error}); free some space or repair the disk, then run the same command "
                "with --resume"
            ) from error
        raise CheckpointError(f"{path}: cannot be {doing} ({error})") from error
