"""Read rows from JSONL and parquet files, globs and hub datasets, each with its location for error messages."""

from __future__ import annotations

import codecs
import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo.config import Source
from dapo.data.memory import PYTHON, Rows, python_rows
from dapo.errors import DataError

GYM = "gym:"
PREPARED = ("dapo-math-17k", "aime-2024", "gsm8k", "math")  # the datasets that `dapo data prepare` writes

# (location, row). A row that cannot be read is yielded as its error, so that a check can continue past it.
RawRow = tuple[str, Mapping[str, Any] | DataError]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PARAMS = ("name", "split", "revision")
_BATCH_ROWS = 1024
_MAX_LINE = 2**24  # bytes, so that a file without line breaks does not fill the memory


def read_rows(source: Source, given: Mapping[str, Rows] | None = None) -> Iterator[RawRow]:
    """Yield the rows of a dataset in order, at most `size` of them. `given` are rows from Python, by path."""
    files = None if source.path.startswith(PYTHON) else find_files(source.path)
    if source.path.startswith(PYTHON):
        rows = python_rows(source.path, given or {})
    elif files is None:
        rows = _read_hub(source)
    elif source.params:
        raise DataError(f"{source.path}: a file takes no params, found {', '.join(map(repr, source.params))}")
    else:
        rows = (row for file in files for row in _read_file(file))
    return islice(rows, source.size)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


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
        and Path(path).suffix.lower() not in (*_READERS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow")
    )


def _read_file(path: Path) -> Iterator[RawRow]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: cannot be read as a dataset; expected a file name that ends in {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or one_line(error)})") from None


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as lines:
        for number in count(1):
            line = lines.readline(_MAX_LINE + 1)
            if not line:
                return
            where = f"{path}, line {number}"
            if len(line) > _MAX_LINE:
                while line and not line.endswith(b"\n"):  # skip the rest of the line
                    line = lines.readline(_MAX_LINE)
                yield where, DataError(f"{where}: longer than {_MAX_LINE:,} bytes; expected one question per line")
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield where, _json_object(line, where)


def _json_object(line: bytes, where: str) -> Mapping[str, Any] | DataError:
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected one object per line")
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or nesting that is too deep
        return DataError(f"{where}: cannot be parsed as JSON ({one_line(error)})")
    if not isinstance(row, dict):
        return DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> Iterator[RawRow]:
    try:
        # Mapped and read in batches: memory holds one batch, whatever the size of the file.
        with pq.ParquetFile(path, memory_map=True) as file:
            yield from _arrow_rows(str(path), file.iter_batches(batch_size=_BATCH_ROWS))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({one_line(error)})") from None


def _arrow_rows(name: str, batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[RawRow]:
    first = 1  # number of the batch's first row
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date that Python cannot represent
            last = first + batch.num_rows - 1
            raise DataError(
                f"{name}, rows {first} to {last}: contain a value that cannot be read ({one_line(error)})"
            ) from None
        for number, row in enumerate(rows, start=first):
            yield f"{name}, row {number}", row
        first += batch.num_rows


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
            f"{source.path}: no such file, and a dataset on the hub needs the package `datasets`: "
            "pip install 'dapo[hub]'"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hide its retries; a failure is reported below
    try:
        table = datasets.load_dataset(
            source.path, source.params.get("name"), split=split, revision=source.params.get("revision")
        )
    except Exception as error:  # the hub's libraries raise many kinds of exceptions
        raise DataError(f"{name}: {_hub_error(datasets, error)}") from None
    # Read Arrow tables, because plain iteration would decode images and audio.
    yield from _arrow_rows(name, table.with_format("arrow").iter(_BATCH_ROWS))


def _hub_error(datasets: Any, error: Exception) -> str:
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return "no such file, and no such dataset on the hub that this account can read"
    if isinstance(error, ConnectionError):
        return f"no such file, and the hub cannot be reached ({one_line(error)})"
    return f"the hub dataset cannot be loaded ({type(error).__name__}: {one_line(error)})"


_READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
