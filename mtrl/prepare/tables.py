"""Tables of a published dataset, read from the first row to the last: Parquet, Arrow, JSON, or a hub id.

Unlike the sources of a run they never read single rows, so Parquet needs no copy, and only a few rows are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from mtrl.data.arrow import MIB, UNREADABLE, ArrowRows, open_hub_dataset
from mtrl.data.cache import DiskCache, file_stamp
from mtrl.data.row_settings import DataError, DataSource, RowError, one_line
from mtrl.data.sources import HUB_ID, list_files, open_sources

BATCH_ROWS = 32  # decoded together
INSPECTED_ROWS = 32  # rows of JSON that are read for the names of the columns


class Table(Protocol):
    name: str
    directory: Path  # relative paths of images start here
    columns: tuple[str, ...]
    stamp: Any  # identifies its content

    def __len__(self) -> int: ...

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield these columns of the rows from `start` on."""


class ParquetTable:
    def __init__(self, files: Sequence[Path], name: str) -> None:
        self.files, self.name, self.directory = files, name, files[0].parent
        self.stamp = [list(file_stamp(file)[1:]) for file in files]
        try:
            schemas = [pq.read_schema(file).names for file in files]
            self.lengths = [pq.read_metadata(file).num_rows for file in files]
        except UNREADABLE as error:
            raise DataError(f"{name} cannot be read as Parquet: {error}") from error
        self.columns = tuple(column for column in schemas[0] if all(column in names for names in schemas))

    def __len__(self) -> int:
        return sum(self.lengths)

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        for file, length in zip(self.files, self.lengths, strict=True):
            if start < length:
                yield from _scan_file(file, columns, start)
            start = max(0, start - length)


def _scan_file(file: Path, columns: Sequence[str], start: int) -> Iterator[dict[str, Any]]:
    try:
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True)
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if start >= rows:
                start -= rows
                continue
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(columns), use_threads=False):
                if start < batch.num_rows:
                    yield from batch.slice(start).to_pylist()
                start = max(0, start - batch.num_rows)
    except UNREADABLE as error:
        raise DataError(f"{file} cannot be read: {one_line(error)}") from error


class ArrowTable:
    def __init__(self, rows: ArrowRows) -> None:
        self.table, self.name, self.directory, self.stamp = rows.table, rows.name, rows.directory, rows.fingerprint
        self.columns = tuple(rows.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        chosen = self.table.select(list(columns))
        for first in range(start, len(self), BATCH_ROWS):
            yield from chosen.slice(first, BATCH_ROWS).to_pylist()


class SourceTable:
    """JSON, JSONL and tars: rows need not have the same columns."""

    def __init__(self, source: DataSource) -> None:
        self.source, self.name, self.directory, self.stamp = source, source.name, source.directory, source.fingerprint
        rows = map(self._read, range(min(INSPECTED_ROWS, len(source))))
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.source)

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        for index in range(start, len(self)):
            row = self._read(index)
            yield {column: row.get(column) for column in columns}

    def _read(self, index: int) -> dict[str, Any]:
        try:
            return self.source.read(index)
        except RowError as error:
            raise DataError(f"{self.name}, row {self.source.row_number(index)}: {error.reason}") from error


def open_table(location: str, split: str | None, config: str | None = None) -> Table:
    """Open a file, a folder or a hub id; a configuration is a folder of that name, as in hub repositories."""
    cache, path = DiskCache(), Path(location).expanduser()
    if not path.exists():
        if HUB_ID.fullmatch(location):
            return ArrowTable(open_hub_dataset(location, split, cache, config))
        raise DataError(f"{location} does not exist")
    if config is not None:
        folders = [folder for folder in (path, *sorted(path.rglob("*"))) if folder.is_dir() and folder.name == config]
        if not folders:
            raise DataError(f"{path} has no folder {config!r}; name the copy of the whole dataset")
        path = folders[0]
    if path.is_dir() and not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        files = list_files(path, split, is_split_optional=True)
        if all(file.suffix == ".parquet" for file in files):
            return ParquetTable(files, str(path))
        sources = [source for file in files for source in open_sources(str(file), cache)]
    elif path.suffix == ".parquet":
        return ParquetTable([path], str(path))
    else:
        has_splits = split is not None and (path / "dataset_dict.json").exists()
        sources = open_sources(f"{path}@{split}" if has_splits else str(path), cache)
    if len(sources) != 1:
        raise DataError(f"{path} holds {len(sources)} files; name one, or convert them to Parquet")
    (source,) = sources
    return ArrowTable(source) if isinstance(source, ArrowRows) else SourceTable(source)


def check_columns(table: Table, required: Sequence[str], dataset: str) -> None:
    missing = [column for column in required if column not in table.columns]
    if missing:
        raise DataError(
            f"{table.name} has no column {' and no column '.join(map(repr, missing))}, so it is not {dataset} as it "
            f"was published; it has {', '.join(table.columns) or 'none'}"
        )
