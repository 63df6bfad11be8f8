"""Read the rows of one file: JSON, CSV, parquet, Arrow and Feather, each with its location for error messages."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from dapo.errors import DataError, first_line

# A row that cannot be read is yielded as its error, so that a check can continue past it.
Row = Mapping[str, Any] | DataError
RawRow = tuple[str, Row]  # with its location

BATCH_ROWS = 1024
_MAX_LINE = 2**24  # bytes, so that a file without line breaks does not fill the memory
_MAX_ARRAY = 2**30  # bytes of a JSON array, which is parsed as a whole


def read_file(path: Path) -> Iterator[RawRow]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: cannot be read as a dataset; expected a file name that ends in {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from None


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


def _json_object(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected one object per line")
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or nesting that is too deep
        return DataError(f"{where}: cannot be parsed as JSON ({first_line(error)})")
    if not isinstance(row, dict):
        return DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _read_json(path: Path) -> Iterator[RawRow]:
    """Read an array of objects, or one object per line."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        if not start.startswith(b"["):
            yield from _read_jsonl(path)
            return
        file.seek(0)
        content = file.read(_MAX_ARRAY + 1)
    if len(content) > _MAX_ARRAY:
        raise DataError(f"{path}: an array of more than {_MAX_ARRAY:,} bytes; write one object per line instead")
    try:
        rows = json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise DataError(f"{path}: not a JSON array ({first_line(error)})") from None
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        found = f"{where}: expected a JSON object, found {type(row).__name__}"
        yield where, row if isinstance(row, dict) else DataError(found)


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Read comma-separated text with a header. Every value is text; an empty cell is null."""
    csv.field_size_limit(_MAX_LINE)
    # Bytes that are not UTF-8 become surrogates, so that the error can name the line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines)
        header: list[str] | None = None
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({first_line(error)})") from None
            if cells is None:
                return
            where = f"{path}, line {reader.line_num}"
            if header is None:
                header = _csv_header(where, cells)
            elif cells:
                yield where, _csv_row(where, header, cells)


def _csv_header(where: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not all(names) or len(set(names)) < len(names) or not _is_utf8(names):
        raise DataError(f"{where}: expected a header with a different name for each column, found {','.join(names)!a}")
    return names


def _csv_row(where: str, header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        return DataError(
            f"{where}: {len(cells)} values for {len(header)} columns; put text that holds commas or line breaks in "
            "double quotes"
        )
    if not _is_utf8(cells):
        return DataError(f"{where}: not UTF-8 text")
    return {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _is_utf8(cells: Iterable[str]) -> bool:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_arrow(path: Path) -> Iterator[RawRow]:
    """Read an Arrow file, which is also Feather's format, or an Arrow stream, as `datasets` writes it."""
    try:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                opened = ipc.open_file(file)
                batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
            else:
                batches = iter(ipc.open_stream(file))
            yield from arrow_rows(str(path), _small_batches(batches))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable Arrow or Feather file ({first_line(error)})") from None


def _small_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        batch.validate(full=True)  # the offsets of a damaged file would lead outside its memory
        yield from (batch.slice(first, BATCH_ROWS) for first in range(0, batch.num_rows, BATCH_ROWS))


def _read_parquet(path: Path) -> Iterator[RawRow]:
    try:
        # Mapped and read in batches: memory holds one batch, whatever the size of the file.
        with pq.ParquetFile(path, memory_map=True) as file:
            yield from arrow_rows(str(path), file.iter_batches(batch_size=BATCH_ROWS))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from None


def arrow_rows(name: str, batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[RawRow]:
    first = 1  # number of the batch's first row
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date that Python cannot represent
            last = first + batch.num_rows - 1
            raise DataError(
                f"{name}, rows {first} to {last}: contain a value that cannot be read ({first_line(error)})"
            ) from None
        for number, row in enumerate(rows, start=first):
            yield f"{name}, row {number}", row
        first += batch.num_rows


_READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
SUFFIXES = tuple(_READERS)
