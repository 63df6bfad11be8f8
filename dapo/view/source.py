"""Read-only access to one run's database. Every query opens the file again and sees one consistent snapshot."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo.errors import CheckpointError
from dapo.store.connection import open_for_reading, readable

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
_LONGEST_CONFIG = 2**18  # characters; a resolved configuration has a few thousand
_DEEPEST_CONFIG = 20


@dataclass(frozen=True, slots=True)
class Run:
    """A run found by `dapo.view.runs`. It holds no open file, so any thread may query it at any time."""

    name: str
    path: Path  # of run.db

    @contextmanager
    def snapshot(self, seconds: float | None = None) -> Iterator[sqlite3.Connection]:
        """Yield a connection to the current state of the database, which does not change inside the block.

        Any fault of the database is raised as a CheckpointError, and so are queries that take longer than `seconds`.
        Opening takes less than a millisecond and leaves nothing to go stale: new steps are visible, a replaced file is
        noticed, and no forgotten reader keeps the writer's WAL growing.
        """
        with closing(open_for_reading(self.path, seconds)) as connection, readable(self.path), connection.unchanged():
            connection.execute("BEGIN")
            yield connection


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. Two equal values mean that nothing was recorded in between."""

    step: int
    groups: int
    event: int  # id of the newest event
    evaluation: int  # id of the newest evaluation


def progress(run: Run) -> Progress:
    with run.snapshot() as database:
        return read_progress(database)


def read_progress(database: sqlite3.Connection) -> Progress:
    # sum(1), not count(*): SQLite runs a plain count(*) as one instruction, which the time limit cannot interrupt, and
    # a hostile file can make that instruction visit the same pages almost forever.
    counts = (
        "SELECT (SELECT coalesce(max(step), 0) FROM steps), (SELECT coalesce(sum(1), 0) FROM groups),"
        " (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM evaluations)"
    )
    return Progress(*database.execute(counts).fetchone())


def configuration(run: Run) -> dict[str, Any]:
    """Return every option of the run by its dotted name."""
    with run.snapshot() as database:
        return read_configuration(database, run.path)


def read_configuration(database: sqlite3.Connection, path: Path) -> dict[str, Any]:
    text = read_meta(database, "config")
    try:
        return dict(_leaves(_parse_yaml(text or ""), ""))
    except Exception as error:  # hostile text makes the parser raise many types; all mean the same here
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise CheckpointError(f"{path}: holds no configuration that can be read ({reason})") from None


def read_meta(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT value AS setting FROM meta WHERE key = ?", (key,)).fetchone()
    if row is not None and not isinstance(row["setting"], str):
        raise ValueError(f"meta has a {key} that is not text")
    return None if row is None else row["setting"]


def placeholders(values: Sized) -> str:
    """Return the question marks of an SQL list."""
    return ", ".join("?" * len(values))


def number_option(options: Mapping[str, Any], key: str) -> float | None:
    """Return the option if it is a number small enough to compute with, else None."""
    value = options.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_number else None


def _parse_yaml(text: str) -> dict[Any, Any]:
    """Parse like `yaml.safe_load`, but refuse alias bombs and unbounded nesting."""
    if len(text) > _LONGEST_CONFIG:
        raise ValueError(f"it has {len(text)} characters")
    depth = 0
    for event in yaml.parse(text, _YamlLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_CONFIG:
            raise ValueError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):  # a resolved configuration has none
            raise ValueError("it has an alias")
    values = yaml.load(text, _YamlLoader)
    if not isinstance(values, dict):
        raise ValueError("it is empty, or not a mapping")
    return values


def _leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
