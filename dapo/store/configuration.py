"""The configuration that a run was trained with: from config.yaml, or from the database's copy if that file is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dapo.config import Config
from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.store.reading import RunReader

CONFIG_FILE, DATABASE_FILE, CHECKPOINTS = "config.yaml", "run.db", "checkpoints"


def is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / DATABASE_FILE).is_file()


def recorded_config(run: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the recorded configuration, with options changed as `overrides` say."""
    if not is_run(run):
        raise CheckpointError(f"{run}: there is no run here (it has neither {CONFIG_FILE} nor {DATABASE_FILE})")
    file = run / CONFIG_FILE
    if file.is_file():
        return Config.load(file, overrides)
    with RunDatabase.open_readonly(run / DATABASE_FILE) as database:
        return database_config(database, overrides)


def database_config(database: RunReader, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that the run has trained with so far; config.yaml may have been edited since."""
    text = database.meta().get("config", "")
    return Config.from_text(text, f"{database.path}: the recorded configuration", overrides)
