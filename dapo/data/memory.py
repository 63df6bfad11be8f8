"""Rows that a Python program gives as objects, in place of a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dapo.config import PYTHON
from dapo.errors import DataError

Rows = Collection[Any]  # each row a mapping of columns, which is checked when it is read


def collect(name: str, rows: Any) -> Rows:
    """Return rows that can be read several times. `name` is the argument that they were given as."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        keys = f" with the keys {', '.join(map(str, list(rows)[:12]))}" if isinstance(rows, Mapping) else ""
        raise DataError(
            f"{name} is a {type(rows).__name__}{keys}; expected rows: a list of dicts, a generator of them, a "
            "datasets.Dataset or a pandas DataFrame"
        )
    if hasattr(rows, "itertuples"):  # a DataFrame, whose missing values are NaN, NaT or NA
        frame: Any = rows
        return frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows if isinstance(rows, Collection) else list(rows)


def python_rows(path: str, given: Mapping[str, Rows]) -> Iterator[tuple[str, Mapping[str, Any] | DataError]]:
    """Yield the rows that were given as `path`, with values of numpy and torch as plain ones."""
    name = path.removeprefix(PYTHON)
    if path not in given:
        raise DataError(
            f"{path}: the rows of this run were given to Trainer as {name.partition('[')[0]}; give them again, from "
            "Python, or name a file"
        )
    for number, row in enumerate(given[path], start=1):
        where = f"{name}, row {number}"
        if isinstance(row, Mapping):
            yield where, {str(column): _plain(value) for column, value in row.items()}
        else:
            yield where, DataError(f"{where}: expected a dict of columns, found {type(row).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return value.tolist() if hasattr(value, "tolist") else value
