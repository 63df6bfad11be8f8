"""The folder of one run: held by one process at a time, and never taken for anything that is not a run.

The order is: take the lock, decide what is there, and only then load a model. Nothing is deleted here but unfinished
files of this program. A folder that holds something else, or checkpoints without a database, is refused as it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import IO, Any

import yaml

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.state import TrainerState
from dapo.config import FIXED, Config, Source, leaves
from dapo.errors import DISK_FAULTS, CheckpointError, StorageError
from dapo.store.database import RunDatabase
from dapo.system.files import fsync, write_text
from dapo.types import Event

_LOCK, _CONFIG, _DATABASE, _CHECKPOINTS = ".lock", "config.yaml", "run.db", "checkpoints"
_MARKER = b"This folder belongs to a run of dapo.\n"
# What a start that was killed can leave behind before its database is there. Other programs have a config.yaml, too.
_OURS = {_LOCK, *(f"{_DATABASE}{end}" for end in ("", "-wal", "-shm", "-journal"))}


class RunDirectory:
    """A run's folder, locked until `close`.

    `saved` is the checkpoint to continue from and `state` what it holds; both are None where a run begins, or resumes
    before its first checkpoint.
    """

    def __init__(self, config: Config, *, resume: bool) -> None:
        self.config, self.resume = config, resume
        self.path = config.run_dir
        self.checkpoints = self.path / _CHECKPOINTS
        self.saved: Path | None = None
        self.state: TrainerState | None = None
        self.changes: list[str] = []
        with _explained(self.path):
            self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self._has_made_lock = not (self.path / _LOCK).exists()
            self._lock = self._take_lock()
        try:
            self.is_begun = self._decide()
            if resume:
                self._look_up()
        except BaseException:
            self.abandon()
            raise

    def begin(self, about: Mapping[str, str]) -> RunDatabase:
        """Open the database, and write down the configuration that the run has from now on."""
        resolved, file = self.config.to_yaml(), self.path / _DATABASE
        self._has_made_lock = False  # it stays from now on, for it says whose folder this is
        with _explained(self.path):
            if self.resume:
                database = RunDatabase.open(file, resolved)
            elif self.is_begun:
                database = RunDatabase.open(file)
                database.restart(resolved, about)
            else:
                database = RunDatabase.create(file, resolved, about)
            if self.changes:
                message = "changed on resume: " + "; ".join(self.changes)
                database.record_event(Event("configuration", message, self.state.step if self.state else 0))
            write_text(self.path / _CONFIG, resolved)  # syncs the folder, and so the database's entry in it, too
            fsync(self.path.parent)
        return database

    def close(self) -> None:
        checkpoint.clean(self.checkpoints)
        self._lock.close()

    def abandon(self) -> None:
        """Let go of a folder in which nothing was begun, and leave it as it was found."""
        with suppress(OSError):
            if self._has_made_lock:
                (self.path / _LOCK).unlink()
                for folder in self._new_folders:
                    folder.rmdir()
        self._lock.close()

    def _take_lock(self) -> IO[bytes]:
        if self.path.exists() and not (self.path / _LOCK).exists():
            self._refuse_what_is_not_a_run()  # before anything is written into it
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            lock = (self.path / _LOCK).open("ab", buffering=0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise CheckpointError(f"{self.path}: another process is training this run") from None
            with suppress(FileNotFoundError):
                # A process that abandons the folder deletes its lock, which may be the file opened here.
                if os.path.samestat(os.fstat(lock.fileno()), (self.path / _LOCK).stat()):
                    return lock
            lock.close()

    def _decide(self) -> bool:
        """Return whether a run was begun here; refuse whatever this process may not touch."""
        file = self.path / _DATABASE
        if not RunDatabase.exists(file):
            self._refuse_what_is_not_a_run()
            if self.resume:
                raise CheckpointError(f"{self.path}: there is no run to resume; leave out --resume to start one")
            self._mark()
            return False
        checkpoint.clean(self.checkpoints)
        with RunDatabase.open(file) as database:
            has_steps = database.last_step() > 0
        if not self.resume and (has_steps or checkpoint.steps(self.checkpoints)):
            raise CheckpointError(
                f"{self.path}: holds a run already; continue it with --resume, or give this one another run.name"
            )
        return True

    def _look_up(self) -> None:
        """Find out where the run stands, and whether it is the one that the configuration describes."""
        with RunDatabase.open(self.path / _DATABASE) as database:
            steps, text = database.last_step(), database.meta()["config"]
        # The database has a copy of the configuration, should the file be lost.
        file = self.path / _CONFIG
        recorded = Config.load(file) if file.exists() else Config.parse(yaml.safe_load(text), source=str(database.path))
        self.changes = _changes(recorded, self.config, self.path)
        self.saved = checkpoint.newest(self.checkpoints)
        if self.saved is None and 0 < recorded.run.save_every < steps:
            raise CheckpointError(
                f"{self.path}: has {steps} recorded steps, but its checkpoints are gone; put them back into "
                f"{self.checkpoints}, or start again under another run.name"
            )
        self.state = checkpoint.read_state(self.saved) if self.saved else None
        if self.state and self.state.step >= self.config.run.steps:
            raise CheckpointError(
                f"{self.path}: has all of its {self.state.step} steps already; raise run.steps to train on"
            )

    def _mark(self) -> None:
        """Say in the lock file whose folder this is: from now on a file in it can be ours."""
        if not self._is_marked():
            with _explained(self.path):
                self._lock.write(_MARKER)

    def _is_marked(self) -> bool:
        with suppress(OSError):
            return (self.path / _LOCK).read_bytes() == _MARKER
        return False

    def _refuse_what_is_not_a_run(self) -> None:
        """Called where there is no database with a run in it."""
        if saved := checkpoint.steps(self.checkpoints):
            raise CheckpointError(
                f"{self.path}: holds checkpoints (of the steps {', '.join(map(str, saved))}) but no run database; copy "
                f"{_DATABASE} back with its {_DATABASE}-wal, or train on under another run.name with model.path="
                f"{self.checkpoints / f'step_{saved[-1]}'}"
            )
        if self._is_marked():
            return
        strangers = set(os.listdir(self.path)) - _OURS
        if self.checkpoints.is_dir() and not os.listdir(self.checkpoints):
            strangers.discard(_CHECKPOINTS)
        if strangers:
            shown = ", ".join(sorted(strangers)[:3]) + (" and others" if len(strangers) > 3 else "")
            raise CheckpointError(
                f"{self.path}: is not the folder of a run, but holds {shown}; choose another run.name or run.dir, or "
                "move these files away"
            )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where, reason = error.filename or path, error.strerror or str(error)
        if error.errno in DISK_FAULTS:
            raise StorageError(
                f"{where}: cannot be written ({reason}); free some space or repair the disk, then try again"
            ) from error
        raise CheckpointError(f"{where}: {reason}; the run needs a folder that it may write to") from error


def _changes(old: Config, new: Config, path: Path) -> list[str]:
    """What differs from the run that is there, in words; refused where it would make it another run."""
    changes = []
    for key, info in leaves():
        was, now = (reduce(getattr, key.split("."), config) for config in (old, new))
        if was == now:
            continue
        if info.json_schema_extra == FIXED:
            raise CheckpointError(
                f"{path}: holds another run: its {key} is {_shown(was)}, here it is {_shown(now)}; use another run.name"
            )
        changes.append(f"{key} {_shown(was)} -> {_shown(now)}")
    return changes


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Source):
        return ", ".join(source.path for source in value)
    return repr(value)
