"""Find the runs in a folder and summarize each in one line, or in one sentence if it cannot be read."""

from __future__ import annotations

import calendar
import os
import sqlite3
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dapo.errors import CheckpointError
from dapo.store.encoding import to_text
from dapo.types import EventKind
from dapo.view.curves import read_curve, thinned
from dapo.view.locks import is_held
from dapo.view.source import Run, number_option, read_configuration, read_meta

Status = Literal["running", "finished", "stopped", "crashed"]

REWARD = "reward/mean"
_DATABASE = "run.db"
_SUMMARY_SECONDS = 2.0  # limit per run: the page shows no line before it has them all
_THREADS = 8
_MAX_TEXT = 1_000  # characters
_RUN_FILES = (_DATABASE, "config.yaml", ".lock")  # a folder with any of these is listed as a run

# Status of a run that no process holds, by the last of these events.
_ENDINGS: dict[str, Status] = {
    EventKind.FINISHED: "finished",
    EventKind.STOPPED: "stopped",
    EventKind.INTERRUPTED: "stopped",
    EventKind.RESUMED: "crashed",
}


@dataclass(frozen=True, slots=True, eq=False)
class RunSummary:
    """One line about a run. If `problem` is set, the other fields are unknown."""

    name: str
    problem: str | None = None
    status: Status | None = None
    model: str = ""
    recipe: str = ""
    step: int = 0
    planned: int = 0
    reward: float | None = None
    started: float | None = None  # seconds since 1970
    changed: float | None = None
    rewards: np.ndarray = field(default_factory=lambda: np.empty(0))  # float64 [points], thinned for a sparkline


def run_names(root: Path) -> list[str]:
    """Return the names of the runs in `root`, sorted. If `root` is itself a run's folder, return only its name."""
    if os.path.lexists(root / _DATABASE):
        return [Path(os.path.realpath(root)).name]
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _looks_like_a_run(Path(entry.path)))
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None


def find_run(root: Path, name: str) -> Run:
    """Return the run of that name. Neither a name nor a symlink can lead out of `root`."""
    if name in ("", ".", "..") or any(character in name for character in ("/", "\\", "\0")):
        raise CheckpointError(f"'{to_text(name)}' is not the name of a run")
    home = Path(os.path.realpath(root))
    is_itself = os.path.lexists(home / _DATABASE)
    if is_itself and name != home.name:
        raise CheckpointError(f"{root}: holds the run '{home.name}', not '{to_text(name)}'")
    folder = home if is_itself else home / name
    database = folder / _DATABASE
    if not os.path.lexists(database):
        raise CheckpointError(f"{to_text(str(folder))}: there is no run database here")
    real = os.path.realpath(database)
    # SQLite also opens the WAL and journal files by name, so none of them may lead outside either.
    for path in (real, *(os.path.realpath(f"{real}{end}") for end in ("-wal", "-shm", "-journal"))):
        if not Path(path).is_relative_to(home):
            raise CheckpointError(f"{to_text(str(database))}: is a link that leads out of {root}; it is not followed")
    return Run(name, Path(real))


def summaries(root: Path, after: str = "", limit: int = 50) -> list[RunSummary]:
    """Summarize up to `limit` runs whose names sort after `after`."""
    names = [name for name in run_names(root) if name > after]
    with ThreadPoolExecutor(_THREADS) as threads:  # so that a slow run does not delay the others
        return list(threads.map(lambda name: summary(root, name), names[:limit]))


def summary(root: Path, name: str, points: int = 60) -> RunSummary:
    if name != to_text(name):
        return RunSummary(to_text(name), problem="the name of the folder is not valid UTF-8; rename it")
    try:
        run = find_run(root, name)
        with run.snapshot(_SUMMARY_SECONDS) as database:
            return _summary(run, database, points)
    except (CheckpointError, OSError) as error:
        return RunSummary(name, problem=to_text(str(error)))


def _looks_like_a_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in _RUN_FILES)


def _summary(run: Run, database: sqlite3.Connection, points: int) -> RunSummary:
    options = read_configuration(database, run.path)
    (step,) = database.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
    newest = [
        database.execute(f"SELECT time FROM {table} ORDER BY {key} DESC LIMIT 1").fetchone()
        for table, key in (("steps", "step"), ("events", "id"), ("evaluations", "id"))
    ]
    changed = max((row["time"] for row in newest if row is not None), default=None)
    started = _started(database)
    curve = thinned(read_curve(database, REWARD), points)
    known = curve.values[~np.isnan(curve.values)]
    return RunSummary(
        run.name,
        status=_status(run, database, step),
        model=_text(options.get("model.path")),
        recipe=_recipe(database, options),
        step=step,
        planned=int(number_option(options, "run.steps") or 0),
        reward=float(known[-1]) if len(known) else None,
        started=started,
        changed=changed or started,
        rewards=curve.values,
    )


def _recipe(database: sqlite3.Connection, options: Mapping[str, Any]) -> str:
    """Return the recorded recipe, else the run's name, which is the recipe's unless another was given."""
    recorded = read_meta(database, "recipe")
    return _text(options.get("run.name") if recorded is None else recorded)


def _status(run: Run, database: sqlite3.Connection, step: int) -> Status:
    lock = run.path.parent / ".lock"
    if is_held(lock):
        return "running"
    kinds = ", ".join("?" * len(_ENDINGS))
    row = database.execute(
        f"SELECT kind FROM events WHERE kind IN ({kinds}) ORDER BY id DESC LIMIT 1", tuple(_ENDINGS)
    ).fetchone()
    if row is not None:
        return _ENDINGS[row["kind"]]
    # `dapo eval` trains nothing, holds no lock and records no final event.
    is_evaluation = step == 0 and not lock.exists() and database.execute("SELECT 1 FROM evaluations").fetchone()
    return "finished" if is_evaluation else "crashed"


def _started(database: sqlite3.Connection) -> float | None:
    created = read_meta(database, "created")
    try:
        return None if created is None else float(calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:_MAX_TEXT]
