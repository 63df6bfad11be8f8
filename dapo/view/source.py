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
from dapo.store.connection import open_for_reading, readable, unchanged

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
_LONGEST_CONFIG = 2**18  # characters; a resolved configuration has some thousands
_DEEPEST_CONFIG = 20


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was found (`dapo.view.runs`). Holds nothing open, so any thread may ask at any time."""

    name: str
    path: Path  # of run.db

    @contextmanager
    def snapshot(self, seconds: float | None = None) -> Iterator[sqlite3.Connection]:
        """The database as it is now, unchanged while in here; whatever is wrong with it is a CheckpointError.

        Opening takes less than a millisecond, and leaves nothing to go stale: new steps are there, a file that another
        run has replaced is noticed, and no forgotten reader keeps the writer's WAL growing. What takes longer than
        `seconds` is given up.
        """
        with closing(open_for_reading(self.path, seconds)) as connection, readable(self.path), unchanged(connection):
            connection.execute("BEGIN")
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
    # A plain count(*) is one instruction of SQLite's, which no time limit interrupts where pages lead in a circle.
    counts = (
        "SELECT (SELECT coalesce(max(step), 0) FROM steps), (SELECT coalesce(sum(1), 0) FROM groups),"
        " (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM evaluations)"
    )
    return Progress(*database.execute(counts).fetchone())


def configuration(run: Run) -> dict[str, Any]:
    """Every option of the run under its dotted name."""
    with run.snapshot() as database:
        return read_configuration(database, run.path)


def read_configuration(database: sqlite3.Connection, path: Path) -> dict[str, Any]:
    text = read_meta(database, "config")
    try:
        values = None if text is None else _parse_yaml(text)
    except Exception as error:  # the parser raises whatever it meets; the configuration cannot be read in any case
        raise CheckpointError(f"{path}: holds no configuration that can be read ({_first_line(error)})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds no configuration that can be read")
    return dict(_leaves(values, ""))


def read_meta(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT value AS setting FROM meta WHERE key = ?", (key,)).fetchone()
    if row is not None and not isinstance(row["setting"], str):
        raise ValueError(f"meta has a {key} that is no text")
    return None if row is None else row["setting"]


def number_option(options: Mapping[str, Any], key: str) -> float | None:
    """The option where it is a number that can be computed with."""
    value = options.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_number else None


def _parse_yaml(text: str) -> Any:
    """As `yaml.safe_load`, but for texts in which a few lines stand for gigabytes, or that are nested without end."""
    if len(text) > _LONGEST_CONFIG:
        raise ValueError(f"it has {len(text)} characters")
    depth = 0
    for event in yaml.parse(text, _YamlLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_CONFIG:
            raise ValueError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):  # a resolved configuration has none
            raise ValueError("it has an alias")
    return yaml.load(text, _YamlLoader)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _leaves(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
