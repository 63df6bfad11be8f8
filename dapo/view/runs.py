"""Find the runs in a folder and summarize each in one line, or in one sentence if it cannot be read."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dapo.errors import CheckpointError
from dapo.store.configuration import ABLATION_FILE, ABLATION_RUNS, CONFIG_FILE, DATABASE_FILE
from dapo.store.encoding import to_text
from dapo.types import EventKind
from dapo.view.curves import read_curve, thinned
from dapo.view.source import Run, number_option, placeholders, read_configuration, read_meta

Status = Literal["running", "finished", "stopped", "crashed"]

REWARD = "reward/mean"
_SUMMARY_SECONDS = 2.0  # limit per run: the page shows no line before it has them all
_THREADS = 8
_POINTS = 60  # of a sparkline
_MAX_TEXT = 1_000  # characters
_RUN_FILES = (DATABASE_FILE, CONFIG_FILE, ".lock")  # a folder with any of these is listed as a run
_LOCKS = Path("/proc/locks")
_ABLATION_REPORT = "ablation.html"  # written by `dapo ablate` beside the folder `runs`

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


def runs_folder(root: Path) -> Path:
    """Return the folder of the runs of an ablation if `root` is that of an ablation, else `root` itself.

    An ablation makes the folder only when its first run begins, so every function here that takes a `root` asks again.
    """
    runs = root / ABLATION_RUNS
    return runs if (root / ABLATION_FILE).is_file() and runs.is_dir() else root


def ablation_report(root: Path) -> Path | None:
    """Return the report of the ablation whose runs are in `root`, if there is one."""
    folder = Path(os.path.realpath(runs_folder(root))).parent
    report = folder / _ABLATION_REPORT
    return report if (folder / ABLATION_FILE).is_file() and report.is_file() else None


def run_names(root: Path) -> list[str]:
    """Return the names of the runs in `root`, sorted. If `root` is itself a run's folder, return only its name."""
    root = runs_folder(root)
    if os.path.lexists(root / DATABASE_FILE):
        return [Path(os.path.realpath(root)).name]
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _looks_like_a_run(Path(entry.path)))
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None


def find_run(root: Path, name: str) -> Run:
    """Return the run of that name. Neither a name nor a symlink can lead out of `root`."""
    root = runs_folder(root)
    if name in ("", ".", "..") or any(character in name for character in ("/", "\\", "\0")):
        raise CheckpointError(f"'{to_text(name)}' is not the name of a run")
    home = Path(os.path.realpath(root))
    is_itself = os.path.lexists(home / DATABASE_FILE)
    if is_itself and name != home.name:
        raise CheckpointError(f"{root}: holds the run '{home.name}', not '{to_text(name)}'")
    folder = home if is_itself else home / name
    database = folder / DATABASE_FILE
    if not os.path.lexists(database):
        raise CheckpointError(f"{to_text(str(folder))}: there is no run database here")
    real = os.path.realpath(database)
    # SQLite also opens the WAL and journal files by name, so none of them may lead outside either.
    for path in (real, *(os.path.realpath(f"{real}{end}") for end in ("-wal", "-shm", "-journal"))):
        if not Path(path).is_relative_to(home):
            raise CheckpointError(f"{to_text(str(database))}: is a link that leads out of {root}; it is not followed")
    return Run(name, Path(real))


def summaries(root: Path, limit: int = 50) -> list[RunSummary]:
    """Summarize the `limit` runs whose folders changed last; those that started last come first."""
    names = run_names(root)
    if len(names) > limit:
        folder = runs_folder(root)
        names = sorted(sorted(names, key=lambda name: _changed(folder / name), reverse=True)[:limit])
    with ThreadPoolExecutor(_THREADS) as threads:  # so that a slow run does not delay the others
        found = threads.map(lambda name: summary(root, name), names)
        return sorted(found, key=lambda each: each.started or 0, reverse=True)


def summary(root: Path, name: str) -> RunSummary:
    if name != to_text(name):
        return RunSummary(to_text(name), problem="the name of the folder is not valid UTF-8; rename it")
    try:
        run = find_run(root, name)
        with run.snapshot(_SUMMARY_SECONDS) as database:
            return _summary(run, database)
    except (CheckpointError, OSError) as error:
        return RunSummary(name, problem=to_text(str(error)))


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _looks_like_a_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in _RUN_FILES)


def _summary(run: Run, database: sqlite3.Connection) -> RunSummary:
    options = read_configuration(database, run.path)
    recipe = read_meta(database, "recipe")
    (step,) = database.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
    newest = [
        database.execute(f"SELECT time FROM {table} ORDER BY {key} DESC LIMIT 1").fetchone()
        for table, key in (("steps", "step"), ("events", "id"), ("evaluations", "id"))
    ]
    changed = max((row["time"] for row in newest if row is not None), default=None)
    started = _started(read_meta(database, "created"))
    curve = thinned(read_curve(database, REWARD), _POINTS)
    known = curve.values[~np.isnan(curve.values)]
    return RunSummary(
        run.name,
        status=_status(run, database, step),
        model=_text(options.get("model.path")),
        # A run has the name of its recipe, unless another was given; then the recipe is recorded.
        recipe=_text(options.get("run.name") if recipe is None else recipe),
        step=step,
        planned=int(number_option(options, "run.steps") or 0),
        reward=float(known[-1]) if len(known) else None,
        started=started,
        changed=changed or started,
        rewards=curve.values,
    )


def _status(run: Run, database: sqlite3.Connection, step: int) -> Status:
    lock = run.path.parent / ".lock"
    if is_held(lock):
        return "running"
    query = f"SELECT kind FROM events WHERE kind IN ({placeholders(_ENDINGS)}) ORDER BY id DESC LIMIT 1"
    row = database.execute(query, tuple(_ENDINGS)).fetchone()
    if row is not None:
        return _ENDINGS[row["kind"]]
    # `dapo eval` trains nothing, holds no lock and records no final event.
    is_evaluation = step == 0 and not lock.exists() and database.execute("SELECT 1 FROM evaluations").fetchone()
    return "finished" if is_evaluation else "crashed"


def _started(created: str | None) -> float | None:
    try:
        return datetime.strptime(created or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:_MAX_TEXT]


def is_held(path: Path) -> bool:
    """Return whether a live process holds an exclusive flock on `path`, as the trainer does on a run's .lock.

    The lock is not taken, because that would refuse a training that starts at this moment.
    """
    try:
        wanted = path.stat()
    except OSError:
        return False
    try:
        table = _LOCKS.read_text(encoding="ascii")
    except OSError:
        return _is_held_by_trying(path)
    # Some file systems (btrfs, overlays) report another device here than in stat. Then check the holder's files.
    return any(
        inode == wanted.st_ino and (device == wanted.st_dev or _has_open(pid, wanted))
        for pid, device, inode in _exclusive_locks(table)
    )


def _exclusive_locks(table: str) -> Iterator[tuple[int, int, int]]:
    """Yield (process, device, inode) for each held lock. A waiting line has an arrow in its second column."""
    for line in table.splitlines():
        columns = line.split()
        if columns[1:2] == ["FLOCK"] and columns[3] == "WRITE":
            major, minor, inode = columns[5].split(":")
            yield int(columns[4]), os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    try:
        return any(os.path.samestat(entry.stat(), wanted) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # the process ended, just closed a file, or belongs to another user
        return False


def _is_held_by_trying(path: Path) -> bool:
    """Try a shared lock for an instant. Used only on systems without a table of locks."""
    try:
        # Non-blocking: opening a FIFO would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), closefd=True) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
