"""The configuration that a run was trained with: from config.yaml, or from the database's copy if that file is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dapo.config import Config
from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.store.reading import RunReader

CONFIG_FILE, DATABASE_FILE, CHECKPOINTS = "config.yaml", "run.db", "checkpoints"
ABLATION_FILE, ABLATION_RUNS = "ablation.yaml", "runs"  # of `dapo ablate`, in the folder of an ablation


def is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / DATABASE_FILE).is_file()


def ablation_of(run: Path) -> Path | None:
    """Return the folder of the ablation that the run belongs to, or None."""
    runs = run.absolute().parent
    return runs.parent if runs.name == ABLATION_RUNS and (runs.parent / ABLATION_FILE).is_file() else None


def check_is_run(folder: Path) -> None:
    """Raise an error that says what the folder holds instead, if it holds no run."""
    if is_run(folder):
        return
    hint = ""
    if (folder / ABLATION_FILE).is_file():
        hint = f"; it is an ablation, whose runs are in {folder / ABLATION_RUNS}"
    elif folder.is_dir() and (runs := sorted(filter(is_run, folder.iterdir()))):
        hint = f"; name one of the runs in it, such as {runs[0]}"
    raise CheckpointError(f"{folder}: there is no run here (it has neither {CONFIG_FILE} nor {DATABASE_FILE}){hint}")


def recorded_config(run: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the recorded configuration, with options changed as `overrides` say."""
    check_is_run(run)
    file = run / CONFIG_FILE
    if file.is_file():
        return Config.load(file, overrides)
    with RunDatabase.open_readonly(run / DATABASE_FILE) as database:
        return database_config(database, overrides)


def database_config(database: RunReader, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that the run has trained with so far; config.yaml may have been edited since."""
    text = database.meta().get("config", "")
    return Config.from_text(text, f"{database.path}: the recorded configuration", overrides)
