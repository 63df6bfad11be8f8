"""One run's database as a page reads it: each question sees one whole state of it, and opens it anew."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo.errors import CheckpointError
from dapo.store.connection import check, connected, explained, reading_mode

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was found (`dapo.view.runs`). Holds nothing open, so any thread may ask at any time."""

    name: str
    path: Path  # of run.db

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """The database as it is now, unchanged while in here; whatever is wrong with it is a CheckpointError.

        Opening takes less than a millisecond, and leaves nothing to go stale: new steps are there, a file that another
        run has replaced is noticed, and no forgotten reader keeps the writer's WAL growing.
        """
        with (
            connected(self.path, reading_mode(self.path)) as connection,
            closing(connection),
            explained(self.path, "read"),
        ):
            connection.execute("BEGIN")
            check(connection, self.path)
            yield connection


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run has got to: as long as it is the same, nothing new was recorded."""

    step: int
    groups: int
    event: int  # the number of the newest event
    evaluation: int


def progress(run: Run) -> Progress:
    with run.snapshot() as database:
        return read_progress(database)


def read_progress(database: sqlite3.Connection) -> Progress:
    counts = (
        "SELECT (SELECT coalesce(max(step), 0) FROM steps), (SELECT count(*) FROM groups),"
        " (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM evaluations)"
    )
    return Progress(*database.execute(counts).fetchone())


def configuration(run: Run) -> dict[str, Any]:
    """Every option of the run under its dotted name."""
    with run.snapshot() as database:
        return read_configuration(database, run.path)


def read_configuration(database: sqlite3.Connection, path: Path) -> dict[str, Any]:
    row = database.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
    try:
        values = None if row is None else yaml.load(row["value"], _YamlLoader)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds no configuration that can be read")
    return dict(_leaves(values, ""))


def _leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
