"""Opening run.db, for writing or for reading, and saying in one sentence what is wrong with it."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from dapo.errors import CheckpointError, DapoError, StorageError
from dapo.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION

# Processor time for one query of a command, or for one snapshot of a page. Waiting for a slow disk or a busy machine
# does not count; whatever leads in a circle computes all the time.
READ_SECONDS = 10.0
_BUSY_SECONDS = 5.0  # how long a reader waits for a lock; a writer in WAL mode holds none that readers need
_CLOSE_SECONDS = 1.0  # how long a writer that closes waits for readers to leave
_ATTEMPTS = 3  # to open a database that a writer opens or closes at the same moment
_LONGEST_VALUE = 16 * 2**20  # bytes: four million tokens
_LONGEST_REASON = 300
_STEPS_BETWEEN_CHECKS = 1_000  # of SQLite's virtual machine: some microseconds

_PYTHON_TYPES: dict[str, frozenset[type]] = {
    "TEXT": frozenset({str}),
    "INTEGER": frozenset({int}),
    "REAL": frozenset({float}),
    "BLOB": frozenset({bytes, type(None)}),  # a response may have no row in rollout_tokens
}


@contextmanager
def connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open for writing (`rw` or `rwc`); the connection is closed again when what follows fails."""
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


def close_writer(connection: sqlite3.Connection, path: Path) -> None:
    """Close so that only run.db stays: the last connection moves the WAL into the file and removes it.

    A reader that is looking at this moment would be the last one, and may not write; so wait for it to leave.
    """
    connection.close()
    wal = Path(f"{path}-wal")
    deadline = time.monotonic() + _CLOSE_SECONDS
    while wal.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        with suppress(CheckpointError), connected(path, "rw") as again:
            is_blank(again)
            again.close()


class DatabaseChanged(CheckpointError):
    """A writer came while the database was read without locks."""


class ReadingConnection(sqlite3.Connection):
    """A connection to a run.db that may be damaged or hostile.

    It refuses values of a type that the schema does not have there, and stops what takes too long.
    """

    path: Path
    stamp: tuple[int, ...] | None = None  # of a file that is read without locks, because nobody was writing to it
    deadline = math.inf

    def allow(self, seconds: float | None = None) -> None:
        """Let this thread compute for so long from now on; default: READ_SECONDS."""
        self.deadline = time.thread_time() + (READ_SECONDS if seconds is None else seconds)

    def cursor(self, factory: Any = None) -> sqlite3.Cursor:
        return super().cursor(factory or _CheckedCursor)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self.cursor().execute(sql, parameters)

    def check_unchanged(self) -> None:
        """Raise where a writer has changed what was read without locks: the answers may not fit together."""
        if self.stamp is not None and self.stamp != _stamp(self.path):
            raise DatabaseChanged(f"{self.path}: was changed while it was being read; try again")

    @property
    def is_outdated(self) -> bool:
        """Whether there is something new that this connection cannot see, because it reads without the WAL."""
        return self.stamp is not None and (self.stamp != _stamp(self.path) or not _is_empty(f"{self.path}-wal"))


class _CheckedCursor(sqlite3.Cursor):
    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        super().execute(sql, parameters)
        if self.description is not None:
            self.row_factory = _row_factory([column[0] for column in self.description])
        return self


def open_for_reading(path: Path, seconds: float | None = None) -> ReadingConnection:
    """Open a run's database, also while it is written; leave no file behind, and never change what is in it."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no run database here")
    for _ in range(_ATTEMPTS - 1):
        with suppress(DatabaseChanged):
            return _open_once(path, seconds)
    return _open_once(path, seconds)


def _open_once(path: Path, seconds: float | None) -> ReadingConnection:
    mode = _reading_mode(path)
    with readable(path):
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=ReadingConnection,
        )
        try:
            connection.path = path
            connection.stamp = _stamp(path) if "immutable" in mode else None
            connection.allow(seconds)
            connection.set_progress_handler(lambda: time.thread_time() > connection.deadline, _STEPS_BETWEEN_CHECKS)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
                connection.execute(f"PRAGMA {pragma}")
            with unchanged(connection):
                check(connection, path)
            return connection
        except BaseException:
            connection.close()
            raise


@contextmanager
def unchanged(connection: sqlite3.Connection) -> Iterator[None]:
    """Read within: what a writer changed meanwhile is no damage, and no answer either."""
    try:
        yield
    except Exception:
        if isinstance(connection, ReadingConnection):
            connection.check_unchanged()
        raise
    if isinstance(connection, ReadingConnection):
        connection.check_unchanged()


def _reading_mode(path: Path) -> str:
    """How to read without leaving a file behind and without disturbing a writer.

    SQLite's readers of a WAL database make `-wal` and `-shm` where they are missing, and cannot remove them if they are
    read-only. Where nothing is in the WAL, run.db holds everything: it is read as it lies there, without locks, and
    whether it was changed meanwhile shows afterwards. Where something is in it, both files are there, a live or a
    killed writer's, and are used. But for a copy without `-shm`: nobody writes to that one, and a connection that may
    write makes the file, and removes both when it closes.
    """
    wal, index, journal = (f"{path}{end}" for end in ("-wal", "-shm", "-journal"))
    for each in (wal, index, journal):
        if os.path.lexists(each) and not os.path.isfile(each):  # opening a FIFO would wait for ever
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
    if is_blank(connection):
        raise CheckpointError(f"{path}: is empty; the run never started, or the file was copied without its -wal file")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise CheckpointError(f"{path}: is an SQLite database, but not that of a run")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{path}: has schema version {version}, but this version of dapo reads {SCHEMA_VERSION}")
    # Objects of the user's own do no harm: no query names them. A view in place of a table could do anything.
    found = _objects(connection, tuple(_schema()))
    for name, expected in _schema().items():
        if found.get(name) != expected:
            what = "is not as dapo makes it" if name in found else "is missing"
            raise CheckpointError(f"{path}: its {expected[0]} {name} {what}, so this is not a run's database")


def is_blank(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def _objects(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Tables, indexes and views by name: what each is, and the statement that made it."""
    query = (
        f"SELECT type, name, sql FROM sqlite_master WHERE name IN ({', '.join('?' * len(names))}) AND type != 'trigger'"
    )
    return {str(row[1]): (str(row[0]), " ".join(str(row[2]).split())) for row in connection.execute(query, names)}


@cache
def _schema() -> dict[str, tuple[str, str]]:
    made = _made()
    names = [row[0] for row in made.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")]
    return _objects(made, names)


@cache
def _column_types() -> dict[str, frozenset[type]]:
    """The Python types that each column may come back as; columns of one name are alike in all tables.

    `meta` is left out: its `value` is text, the one in `metrics` a number.
    """
    made, found = _made(), {}
    for table, (kind, _) in _schema().items():
        if kind != "table" or table == "meta":
            continue
        for _, name, declared, is_required, _, key in made.execute(f"PRAGMA table_info({table})"):
            nothing = frozenset() if is_required or key else frozenset({type(None)})
            found[name] = found.get(name, frozenset()) | _PYTHON_TYPES[declared] | nothing
    return found


def _made() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    made.executescript(SCHEMA)
    return made


def _row_factory(names: Sequence[str]) -> Callable[[sqlite3.Cursor, tuple[Any, ...]], sqlite3.Row]:
    """Make rows whose columns that are named as in the schema also have the types that the schema says."""
    types = _column_types()
    checks = [(place, types[name], name) for place, name in enumerate(names) if name in types]
    if not checks:
        return sqlite3.Row

    def build(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> sqlite3.Row:
        for place, allowed, name in checks:
            if type(values[place]) not in allowed:
                wanted = " or ".join(sorted(each.__name__ for each in allowed))
                raise ValueError(f"a {name} is {type(values[place]).__name__} instead of {wanted}")
        return sqlite3.Row(cursor, values)

    return build


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
                f"{path}: cannot be {doing} ({_reason(error)}); free some space or repair the disk, then run the same "
                "command with --resume"
            ) from error
        raise CheckpointError(f"{path}: cannot be {doing} ({_reason(error)})") from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever the content of a database makes fail into one sentence: it may be damaged, or made to do harm.

    Values that are not what a run writes show as errors of conversion here, where they are read, and not later.
    """
    try:
        yield
    except DapoError:
        raise
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise CheckpointError(f"{path}: cannot be read: it takes too long, as a damaged file may") from error
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: not what a run writes ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The error's words on one line, of sensible length: they may quote what is in the file."""
    words = re.sub(r"[^\w\s!-~]+", "?", " ".join(str(error).split())) or type(error).__name__
    return words if len(words) <= _LONGEST_REASON else words[:_LONGEST_REASON] + "…"
