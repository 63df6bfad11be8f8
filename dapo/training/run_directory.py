"""The folder of one run: locked by one process at a time, and checked before anything is written.

The order is: take the lock, find out what the folder holds, and only then load a model. Only unfinished files of this
program are deleted. A folder that holds something else, or checkpoints without a database, is refused unchanged.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.state import TrainerState
from dapo.config import FIXED, Config, Source, leaves
from dapo.errors import DISK_FAULTS, CheckpointError, ConfigError, RunExists, StorageError, counted
from dapo.store.configuration import CHECKPOINTS, CONFIG_FILE, DATABASE_FILE, database_config, recorded_config
from dapo.store.database import RunDatabase
from dapo.system.files import fsync, write_text
from dapo.types import Event, EventKind

_LOCK = ".lock"
_MARKER = b"This folder belongs to a run of dapo.\n"
# Files that a run may leave behind if it is killed before its database exists. (Other programs also use config.yaml.)
_OURS = {_LOCK, *(f"{DATABASE_FILE}{end}" for end in ("", "-wal", "-shm", "-journal"))}


class RunDirectory:
    """A run's folder, locked until `close`.

    `saved` is the checkpoint to resume from, and `state` its trainer state. Both are None for a new run, and for a run
    that resumes before its first checkpoint. `is_finished` is read from the run's database.
    """

    held: ClassVar[set[Path]] = set()  # folders that this process has locked

    def __init__(self, config: Config, *, resume: bool) -> None:
        self.config, self.resume = config, resume
        self.path = config.run_dir
        self.checkpoints = self.path / CHECKPOINTS
        self.saved: Path | None = None
        self.state: TrainerState | None = None
        self.is_finished = False
        self.changes: list[str] = []
        with _explained(self.path):
            self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self._has_made_lock = not (self.path / _LOCK).exists()
            self._lock = self._take_lock()
        try:
            self.is_begun = self._has_run()
            if resume:
                self._find_checkpoint()
        except BaseException:
            self.abandon()
            raise

    @classmethod
    def of_new_run(cls, config: Config) -> RunDirectory:
        """Return the folder of a new run, with the next free name (NAME-2) if NAME holds another run."""
        named, number = config, 1
        while True:
            try:
                return cls(named, resume=False)
            except RunExists:
                number += 1
                named = config.renamed(f"{config.run.name}-{number}")

    def begin(self, about: Mapping[str, str]) -> RunDatabase:
        """Open the database, and save the run's configuration."""
        resolved, file = self.config.to_yaml(), self.path / DATABASE_FILE
        self._has_made_lock = False  # the lock file stays from now on: it marks the folder as a run's
        with _explained(self.path):
            if self.is_begun:
                # Before the database: if the process is killed in between, the next resume still finds the changes.
                write_text(self.path / CONFIG_FILE, resolved)
                database = RunDatabase.open(file)
            else:
                database = RunDatabase.create(file, resolved, about)
                write_text(self.path / CONFIG_FILE, resolved)  # also syncs the folder, and with it the database's entry
            if self.resume:
                was = database.meta()
                self.changes += [f"{key} {was[key]} -> {now}" for key, now in about.items() if was.get(key, now) != now]
                database.record_resume(resolved, about, self.change)
            elif self.is_begun:
                database.restart(resolved, about)
            fsync(self.path.parent)
        return database

    @property
    def change(self) -> Event | None:
        """The event that lists what differs from the run so far."""
        message = "changed on resume: " + "; ".join(self.changes)
        step = self.state.step if self.state else 0
        return Event(EventKind.CONFIGURATION, message, step) if self.changes else None

    def require_in_place(self) -> None:
        """Raise if the folder was moved or deleted during training, because further writes would be lost."""
        if not self._is_in_place(self._lock):
            raise StorageError(
                f"{self.path}: the run's folder was moved, deleted or replaced while the run was training; move it "
                f"back, then continue with dapo resume {self.path}"
            )

    def close(self) -> None:
        checkpoint.clean(self.checkpoints)
        self._unlock()

    def abandon(self) -> None:
        """Unlock a folder in which no run was begun, and leave it as it was found."""
        with suppress(OSError):
            if self._has_made_lock:
                (self.path / _LOCK).unlink()
                for folder in self._new_folders:
                    folder.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        self.held.discard(self.path.resolve())
        self._lock.close()

    def _take_lock(self) -> IO[bytes]:
        if self.path.exists() and not any((self.path / name).exists() for name in (_LOCK, DATABASE_FILE)):
            self._refuse_foreign_content()  # before anything is written into the folder
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            if os.path.lexists(self.path / _LOCK) and not (self.path / _LOCK).is_file():
                raise CheckpointError(f"{self.path / _LOCK}: is not a regular file; remove it")  # a FIFO would block
            lock = (self.path / _LOCK).open("ab", buffering=0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                if self.path.resolve() in self.held:
                    raise RunExists(
                        f"{self.path}: another Trainer of this program has this run open; call its close(), or delete "
                        "all references to it"
                    ) from None
                raise RunExists(f"{self.path}: another process is training this run") from None
            # A process that abandons the folder deletes the lock file. If it deleted the file opened here, retry.
            if self._is_in_place(lock):
                self.held.add(self.path.resolve())
                return lock
            lock.close()

    def _is_in_place(self, lock: IO[bytes]) -> bool:
        """Return whether the open lock file is still the one in the folder."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(lock.fileno()), (self.path / _LOCK).stat())
        return False

    def _has_run(self) -> bool:
        """Return whether the folder holds a run; refuse one that must not be changed."""
        file = self.path / DATABASE_FILE
        if not RunDatabase.exists(file):
            self._refuse_foreign_content()
            if self.resume:
                raise CheckpointError(f"{self.path}: there is no run to resume; leave out --resume to start one")
            self._mark()
            return False
        checkpoint.clean(self.checkpoints)
        with RunDatabase.open(file) as database:
            has_steps = database.last_step() > 0
        if not self.resume and (has_steps or checkpoint.steps(self.checkpoints)):
            raise RunExists(
                f"{self.path}: already holds a run; continue it with --resume (from Python: resume=True), or choose "
                "another run.name"
            )
        return True

    def _find_checkpoint(self) -> None:
        """Find the checkpoint to resume from, and check that the configuration describes the same run."""
        with RunDatabase.open(self.path / DATABASE_FILE) as database:
            steps, self.is_finished = database.last_step(), database.is_finished()
            recorded, notes = self._recorded(database)
        self.changes = [*self._changes(recorded), *notes]
        self.saved = checkpoint.newest(self.checkpoints)
        # The first checkpoint is written in the background, and complete at the latest when the second is due.
        limit = recorded.run.save_every * (2 if self.checkpoints.is_dir() else 1)
        if self.saved is None and steps > 0 and (self.is_finished or 0 < limit < steps):
            raise CheckpointError(
                f"{self.path}: has recorded {counted(steps, 'step')}, but its checkpoints are missing; put them back "
                f"into {self.checkpoints}, or start again under another run.name"
            )
        self.state = checkpoint.read_state(self.saved) if self.saved else None
        steps = self.config.run.steps
        if self.is_finished and self.state and steps is not None and self.state.step >= steps:
            raise CheckpointError(
                f"{self.path}: has already finished {counted(self.state.step, 'step')}; raise run.steps to continue"
            )
        if self.state and steps is not None and steps != recorded.run.steps and steps < self.state.step:
            raise CheckpointError(
                f"{self.path}: run.steps is {steps}, but the run has already reached step {self.state.step}; it counts "
                "all steps of the run, so give a higher number"
            )

    def _recorded(self, database: RunDatabase) -> tuple[Config, list[str]]:
        """Return the options that the run has trained with; config.yaml if another version of dapo recorded them."""
        try:
            return database_config(database), []
        except ConfigError as error:
            return recorded_config(self.path), [f"{CONFIG_FILE} is used without comparing it ({error})"]

    def _changes(self, recorded: Config) -> list[str]:
        """Describe the options that differ from the recorded run; refuse changes that would make it another run."""
        fixed = {key for key, info in leaves() if info.json_schema_extra == FIXED}
        found = recorded.differences(self.config)
        for key in fixed & found.keys():
            was, now = map(shown, found[key])
            raise CheckpointError(
                f"{self.path}: {key} cannot change in a run: it is {was}, not {now}; set it back, or choose another "
                "run.name"
            )
        return [f"{key} {shown(was)} -> {shown(now)}" for key, (was, now) in found.items()]

    def _mark(self) -> None:
        """Mark the folder as a run's in its lock file, so that a later start may reuse leftover files."""
        if not self._is_marked():
            with _explained(self.path):
                self._lock.write(_MARKER)

    def _is_marked(self) -> bool:
        with suppress(OSError):
            return (self.path / _LOCK).read_bytes() == _MARKER
        return False

    def _refuse_foreign_content(self) -> None:
        """Raise if a folder without a recorded run holds checkpoints or other programs' files."""
        if saved := checkpoint.steps(self.checkpoints):
            raise CheckpointError(
                f"{self.path}: holds checkpoints (of steps {', '.join(map(str, saved))}) but no run database; copy "
                f"{DATABASE_FILE} back with its {DATABASE_FILE}-wal, or continue under another run.name with "
                f"model.path={self.checkpoints / f'step_{saved[-1]}'}"
            )
        if self._is_marked():
            return
        foreign = set(os.listdir(self.path)) - _OURS
        if self.checkpoints.is_dir() and not os.listdir(self.checkpoints):
            foreign.discard(CHECKPOINTS)
        if foreign:
            shown = ", ".join(sorted(foreign)[:3]) + (" and others" if len(foreign) > 3 else "")
            raise CheckpointError(
                f"{self.path}: is not a run's folder, but holds {shown}; choose another run.name or run.dir, or move "
                "these files away"
            )


def is_locked(path: Path) -> bool:
    """Return whether another process is training the run in this folder."""
    try:
        with (path / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or it cannot be read: training says so
        pass
    return False


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


def shown(value: Any) -> str:
    """Return an option's value as messages show it."""
    if isinstance(value, tuple) and value and isinstance(value[0], Source):
        return ", ".join(source.path for source in value)
    return repr(value)
