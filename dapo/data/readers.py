"""Find a dataset (a file, a glob or a hub id) and read its rows, with columns renamed as data.columns says."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from dapo.config import PYTHON, Source
from dapo.data.formats import BATCH_ROWS, SUFFIXES, RawRow, arrow_rows, read_file
from dapo.data.memory import Rows, python_rows
from dapo.errors import DataError, first_line
from dapo.system.install import install_hint

GYM = "gym:"
PREPARED = ("dapo-math-17k", "aime-2024", "gsm8k", "math")  # the datasets that `dapo data prepare` writes

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PARAMS = ("name", "split", "revision")


def read_rows(
    source: Source, given: Mapping[str, Rows] | None = None, *, columns: Mapping[str, str] | None = None
) -> Iterator[RawRow]:
    """Yield the rows of a dataset in order, at most `size` of them. `given` are rows from Python, by path.

    `columns` names the column of the file behind each column of a row, unless the source has its own mapping.
    """
    mapping = source.columns if source.columns is not None else columns
    rows = _raw_rows(source, given or {})
    return ((where, _renamed(where, row, mapping)) for where, row in rows) if mapping else rows


def _raw_rows(source: Source, given: Mapping[str, Rows]) -> Iterator[RawRow]:
    files = None if source.path.startswith(PYTHON) else find_files(source.path)
    if source.path.startswith(PYTHON):
        rows = python_rows(source.path, given)
    elif files is None:
        rows = _read_hub(source)
    elif source.params:
        raise DataError(f"{source.path}: a file takes no params, found {', '.join(map(repr, source.params))}")
    else:
        rows = (row for file in files for row in read_file(file))
    return islice(rows, source.size)


def _renamed(
    where: str, row: Mapping[str, Any] | DataError, mapping: Mapping[str, str]
) -> Mapping[str, Any] | DataError:
    """Return the row with its columns renamed as data.columns says."""
    if isinstance(row, DataError):
        return row
    for name, column in mapping.items():
        if column not in row:
            return DataError(
                f"{where}: there is no column '{column}', which data.columns names for '{name}'{columns_hint(row)}"
            )
    renamed = {name: value for name, value in row.items() if name not in mapping.values()}
    if "answer" in mapping:
        renamed.pop("reward_model", None)  # which would be read first
    return renamed | {name: row[column] for name, column in mapping.items()}


def columns_hint(row: Mapping[str, Any]) -> str:
    """Return the end of an error message: the columns that a row has."""
    return f"; columns: {', '.join(map(str, list(row)[:12]))}" if row else ""


def find_files(path: str) -> list[Path] | None:
    """Return the files that a path or glob names, or None if it can only be the id of a hub dataset."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown ~name
    if expanded.is_dir():
        raise DataError(f"{path}: is a folder; name its files, for example {path.rstrip('/')}/*.parquet")
    if expanded.exists():
        return [expanded]
    if any(character in path for character in "*?["):
        found = sorted(Path(name) for name in glob.glob(str(expanded), recursive=True) if not Path(name).is_dir())
        if not found:
            raise DataError(f"{path}: no file matches; relative paths start at the working directory")
        return found
    if _is_hub_id(path):
        return None
    stem = expanded.stem.removesuffix("-test")
    hint = (
        f"`dapo data prepare {stem}` writes it" if stem in PREPARED else "relative paths start at the working directory"
    )
    raise DataError(f"{path}: cannot be read (no such file); {hint}")


def _is_hub_id(path: str) -> bool:
    return (
        _HUB_ID.fullmatch(path) is not None
        and not path.startswith((".", "~"))
        and Path(path).suffix.lower() not in (*SUFFIXES, ".tsv", ".txt", ".gz", ".zst")
    )


def _read_hub(source: Source) -> Iterator[RawRow]:
    for key in source.params:
        if key not in _HUB_PARAMS:
            raise DataError(f"{source.path}: unknown params key '{key}'; a hub dataset takes {', '.join(_HUB_PARAMS)}")
    split = source.params.get("split", "train")
    name = f"{source.path} ({', '.join(str(part) for part in (source.params.get('name'), split) if part)})"
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source.path}: no such file, and a dataset on the hub needs the package `datasets`: {install_hint('hub')}"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hide its retries; a failure is reported below
    try:
        table = datasets.load_dataset(
            source.path, source.params.get("name"), split=split, revision=source.params.get("revision")
        )
    except Exception as error:  # the hub's libraries raise many kinds of exceptions
        raise DataError(f"{name}: {_hub_error(datasets, error)}") from None
    # Read Arrow tables, because plain iteration would decode images and audio.
    yield from arrow_rows(name, table.with_format("arrow").iter(BATCH_ROWS))


def _hub_error(datasets: Any, error: Exception) -> str:
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return "no such file, and no such dataset on the hub that this account can read"
    if isinstance(error, ConnectionError):
        return f"no such file, and the hub cannot be reached ({first_line(error)})"
    return f"the hub dataset cannot be loaded ({type(error).__name__}: {first_line(error)})"
