"""Connections to run.db for writing and for reading, and one-sentence errors for whatever is wrong with the file."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from dapo.errors import CheckpointError, DapoError, StorageError
from dapo.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION

# CPU time for one query of a command, or for one snapshot of the page. Waiting for a slow disk or a busy machine does
# not count; a query that runs in a cycle over damaged pages uses CPU time all along.
READ_SECONDS = 10.0
_BUSY_SECONDS = 5.0  # a reader's wait for a lock; in WAL mode a writer never blocks readers
_CLOSE_SECONDS = 1.0  # a closing writer's wait for readers to leave
_ATTEMPTS = 3  # to open a database while a writer opens or closes it
_LONGEST_VALUE = 16 * 2**20  # bytes: four million tokens
_LONGEST_REASON = 300
_STEPS_BETWEEN_CHECKS = 1_000  # instructions of SQLite's virtual machine: some microseconds

_PYTHON_TYPES: dict[str, frozenset[type]] = {
    "TEXT": frozenset({str}),
    "INTEGER": frozenset({int}),
    "REAL": frozenset({float}),
    "BLOB": frozenset({bytes, type(None)}),  # a response may have no row in rollout_tokens
}


class Connection(sqlite3.Connection):
    """A connection to a run.db. A reader stops queries that take too long: the file may be damaged or hostile."""

    path: Path
    is_writer = False
    stamp: tuple[int, ...] | None = None  # identity of the file when it was opened, if it is read without locks
    deadline = math.inf  # in CPU seconds of this thread

    def allow(self, seconds: float | None = None) -> None:
        """Set the deadline to this many CPU seconds from now; default: READ_SECONDS."""
        self.deadline = time.thread_time() + (READ_SECONDS if seconds is None else seconds)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise DatabaseChanged if a writer changes a file that is read without locks, even if the block itself failed.

        Such a failure is not damage, and a result obtained meanwhile cannot be trusted.
        """
        try:
            yield
        except Exception:
            self._check_unchanged()
            raise
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self.stamp is not None and self.stamp != _stamp(self.path):
            raise DatabaseChanged(f"{self.path}: changed while it was being read; try again")

    @property
    def is_outdated(self) -> bool:
        """Whether the file has new content that this connection, which reads without the WAL, cannot see."""
        return self.stamp is not None and (self.stamp != _stamp(self.path) or not _is_empty(f"{self.path}-wal"))


class DatabaseChanged(CheckpointError):
    """A writer changed the database while it was being read without locks."""


@contextmanager
def connected(path: Path, mode: str, wait: float = 60) -> Iterator[Connection]:
    """Connect with SQLite's `mode`; the connection is closed if the block fails."""
    if mode != "rwc" and not os.path.isfile(path):
        what = "is not a regular file" if os.path.lexists(path) else "there is no run database here"
        raise CheckpointError(f"{path}: {what}")
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=wait,
        isolation_level=None,
        check_same_thread=False,  # the trainer writes from a background thread, one thread at a time
        factory=Connection,
    )
    try:
        connection.path = path
        connection.row_factory = sqlite3.Row
        yield connection
    except BaseException:
        connection.close()
        raise


@contextmanager
def open_for_writing(path: Path, mode: str = "rw") -> Iterator[Connection]:
    """Open with `mode` rw or rwc (create); the connection is closed if the block fails."""
    with explained(path, "opened as a run database"), connected(path, mode) as connection:
        connection.is_writer = True
        connection.execute("PRAGMA foreign_keys = ON")
        # FULL adds one fsync per step, which is little next to the seconds a step takes. NORMAL would be enough
        # for a killed process, but a power cut could then leave the database behind the checkpoint.
        connection.execute("PRAGMA synchronous = FULL")
        yield connection


def close(connection: Connection) -> None:
    """Close so that only run.db remains: the last connection to close moves the WAL into run.db and deletes it.

    If a reader is still open, it would be the last, and it cannot write. So wait for it to leave, then open and close
    once more.
    """
    connection.close()
    wal = Path(f"{connection.path}-wal")
    deadline = time.monotonic() + _CLOSE_SECONDS
    while connection.is_writer and wal.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        with suppress(CheckpointError), open_for_writing(connection.path) as again:
            is_blank(again)
            again.close()


def open_for_reading(path: Path, seconds: float | None = None) -> Connection:
    """Open a run's database, even while a run writes to it; create no files and change nothing."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(DatabaseChanged):
            return _open_once(path, seconds)
    return _open_once(path, seconds)


def _open_once(path: Path, seconds: float | None) -> Connection:
    mode = _reading_mode(path)
    with readable(path), connected(path, mode, _BUSY_SECONDS) as connection:
        connection.row_factory = _checked_row
        connection.stamp = _stamp(path) if "immutable" in mode else None
        connection.allow(seconds)
        connection.set_progress_handler(lambda: time.thread_time() > connection.deadline, _STEPS_BETWEEN_CHECKS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")
        with connection.unchanged():
            check(connection, path)
        return connection


def _reading_mode(path: Path) -> str:
    """Return the SQLite open mode that leaves no file behind and does not disturb a writer.

    A read-only SQLite connection to a WAL database creates missing `-wal` and `-shm` files and cannot delete them. So:

    - An empty or missing WAL means that run.db holds everything. It is read without locks (`immutable`), and
      `Connection.unchanged` finds out afterwards whether a writer came.
    - A WAL with content and its `-shm` belong to a live or a killed writer. They are used as they are.
    - A WAL with content but without `-shm` is a copy, which has no writer. A connection that may write creates the
      `-shm`, and removes both files when it closes.
    """
    wal, index, journal = (f"{path}{end}" for end in ("-wal", "-shm", "-journal"))
    for each in (wal, index, journal):
        if os.path.lexists(each) and not os.path.isfile(each):  # opening a FIFO would block forever
            raise CheckpointError(f"{each}: is not a regular file; remove it to read the run")
    if os.path.exists(journal):
        return "ro"
    if _is_empty(wal):
        return "ro&immutable=1"
    return "ro" if os.path.exists(index) else "rw"


def _is_empty(path: str) -> bool:
    try:
        return os.path.getsize(path) == 0
    except OSError:
        return True


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise unless this is a run's database with exactly the tables, indexes and views of this schema version."""
    if is_blank(connection):
        raise CheckpointError(f"{path}: is empty; the run never started, or the file was copied without its -wal file")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise CheckpointError(f"{path}: is an SQLite database, but not a run's")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: has schema version {version}, but this version of dapo reads {SCHEMA_VERSION}; use the version "
            "that wrote it"
        )
    # A user's own tables do no harm: no query names them. But a view in place of a table could run anything.
    found = _objects(connection, tuple(_schema()))
    for name, expected in _schema().items():
        if found.get(name) != expected:
            problem = "is not as dapo makes it" if name in found else "is missing"
            raise CheckpointError(f"{path}: its {expected[0]} {name} {problem}, so this is not a run's database")


def is_blank(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def _objects(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return tables, indexes and views by name: the type of each and the statement that created it."""
    query = (
        f"SELECT type, name, sql FROM sqlite_master WHERE name IN ({', '.join('?' * len(names))}) AND type != 'trigger'"
    )
    return {str(row[1]): (str(row[0]), " ".join(str(row[2]).split())) for row in connection.execute(query, names)}


@cache
def _schema() -> dict[str, tuple[str, str]]:
    """Return the objects of a fresh database: what `check` compares with."""
    fresh = _fresh_database()
    names = [row[0] for row in fresh.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")]
    return _objects(fresh, names)


@cache
def _column_types() -> dict[str, frozenset[type]]:
    """Return the Python types that each column may have. Columns with the same name have the same type in all tables.

    Except `value`, which is text in `meta` and a number in `metrics`: `meta` is left out here.
    """
    fresh, found = _fresh_database(), {}
    for table, (kind, _) in _schema().items():
        if kind != "table" or table == "meta":
            continue
        for _, name, declared, is_required, _, key in fresh.execute(f"PRAGMA table_info({table})"):
            null = frozenset() if is_required or key else frozenset({type(None)})
            found[name] = found.get(name, frozenset()) | _PYTHON_TYPES[declared] | null
    found["acc"] |= {float}  # SQLite keeps a share as it is, although the column is declared as INTEGER
    return found


def _fresh_database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    return connection


def _checked_row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> sqlite3.Row:
    """Make a row, and refuse a column of the schema whose value has another type than the schema says."""
    types = _column_types()
    for column, value in zip(cursor.description, values, strict=True):
        allowed = types.get(column[0])
        if allowed is not None and type(value) not in allowed:
            expected = " or ".join(sorted(each.__name__ for each in allowed))
            raise ValueError(f"a {column[0]} is {type(value).__name__} instead of {expected}")
    return sqlite3.Row(cursor, values)


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn what a writer's user can fix (a damaged file, a full disk, no permission) into one sentence.

    If the disk failed while writing, SQLite has rolled the transaction back, so the run can resume.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError) and type(error) is not sqlite3.DatabaseError:
            raise  # a bug
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StorageError(
                f"{path}: cannot be {doing} ({_reason(error)}); free some space or repair the disk, then run the same "
                "command again (a run continues with dapo resume)"
            ) from error
        raise CheckpointError(f"{path}: cannot be {doing} ({_reason(error)})") from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn every error that a damaged or hostile database can cause into one sentence.

    Values that a run would not have written fail here, where they are decoded, and not later.
    """
    try:
        yield
    except DapoError:
        raise
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise CheckpointError(f"{path}: cannot be read: it takes too long; the file may be damaged") from error
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
            raise StorageError(
                f"{path}: cannot be read ({_reason(error)}); repair the disk, then run the same command again"
            ) from error
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: not what a run writes ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """Return the error's message as one short, printable line: it may quote the content of the file."""
    message = re.sub(r"[^\w\s!-~]+", "?", " ".join(str(error).split())) or type(error).__name__
    return message if len(message) <= _LONGEST_REASON else message[:_LONGEST_REASON] + "…"
