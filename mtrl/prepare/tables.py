"""A dataset as it was published, read from its first row to its last: Parquet, Arrow, JSON, or by its id on the hub.

Unlike the sources of a run these are never asked for a single row, so that Parquet needs no copy, and no more than a
few rows are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from mtrl.data.arrow import MIB, UNREADABLE, ArrowRows, open_hub_dataset
from mtrl.data.cache import DiskCache, file_stamp
from mtrl.data.row_settings import DataError, RowError
from mtrl.data.sources import HUB_ID, DataSource, list_files, open_sources

AT_ONCE = 32  # rows decoded together
LOOKED_AT = 32  # rows of JSON whose columns are looked at


class Table(Protocol):
    name: str
    directory: Path  # relative paths of images start here
    columns: tuple[str, ...]
    stamp: Any  # what says that it is still the same one

    def __len__(self) -> int: ...

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows from `start` on, with these columns of them."""


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
            for batch in parquet.iter_batches(AT_ONCE, row_groups=[group], columns=list(columns), use_threads=False):
                if start < batch.num_rows:
                    yield from batch.slice(start).to_pylist()
                start = max(0, start - batch.num_rows)
    except UNREADABLE as error:
        raise DataError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error


class ArrowTable:
    def __init__(self, rows: ArrowRows) -> None:
        self.table, self.name, self.directory, self.stamp = rows.table, rows.name, rows.directory, rows.fingerprint
        self.columns = tuple(rows.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def scan(self, columns: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
        chosen = self.table.select(list(columns))
        for first in range(start, len(self), AT_ONCE):
            yield from chosen.slice(first, AT_ONCE).to_pylist()


class SourceTable:
    """JSON, JSONL and tars: rows need not have the same columns."""

    def __init__(self, source: DataSource) -> None:
        self.source, self.name, self.directory, self.stamp = source, source.name, source.directory, source.fingerprint
        seen: dict[str, None] = {}
        for index in range(min(LOOKED_AT, len(source))):
            seen |= dict.fromkeys(self._read(index))
        self.columns = tuple(seen)

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


def open_table(where: str, split: str | None, config: str | None = None) -> Table:
    """A file, a folder or a hub id; of a configuration the folder of that name, as repositories of the hub have it."""
    cache, path = DiskCache(), Path(where).expanduser()
    if not path.exists():
        if HUB_ID.fullmatch(where):
            return ArrowTable(open_hub_dataset(where, split, cache, config))
        raise DataError(f"{where} does not exist")
    if config is not None:
        path = _table_folder(path, config)
    if path.is_dir() and not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        files = list_files(path, split, if_told=True)
        if all(file.suffix == ".parquet" for file in files):
            return ParquetTable(files, str(path))
        sources = [source for file in files for source in open_sources(str(file), cache)]
    elif path.suffix == ".parquet":
        return ParquetTable([path], str(path))
    else:
        several = split is not None and (path / "dataset_dict.json").exists()
        sources = open_sources(f"{path}@{split}" if several else str(path), cache)
    if len(sources) != 1:
        raise DataError(f"{path} holds {len(sources)} files; name one, or make them Parquet")
    (source,) = sources
    return ArrowTable(source) if isinstance(source, ArrowRows) else SourceTable(source)


def _table_folder(path: Path, config: str) -> Path:
    found = [folder for folder in (path, *sorted(path.rglob("*"))) if folder.is_dir() and folder.name == config]
    if not found:
        raise DataError(f"{path} has no folder {config!r}; name the copy of the whole dataset")
    return found[0]


def want_columns(table: Table, wanted: Sequence[str], dataset: str) -> None:
    missing = [column for column in wanted if column not in table.columns]
    if missing:
        raise DataError(
            f"{table.name} has no column {' and no column '.join(map(repr, missing))}, so it is not {dataset} as it "
            f"was published; it has {', '.join(table.columns) or 'none'}"
        )
