"""Rows of Parquet and Arrow tables, read lazily: images stored as bytes stay on disk until their row is read."""

from __future__ import annotations

import bisect
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from mtrl.data.cache import DiskCache, file_stamp, pack_json, unpack_json
from mtrl.data.row_settings import DataError, DataSource, RowError, one_line, shorten
from mtrl.utils.files import atomic_write, regular_file

MIB = 1 << 20
MAX_ROW_GROUP = 8 * MIB  # bytes; a larger row group is too slow to decode for a single row
MAX_HASHED_BYTES = MIB // 8  # per binary value
UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)  # ValueError: also bad UTF-8

logger = logging.getLogger(__name__)


class ArrowRows(DataSource):
    """A memory-mapped table, as `datasets` writes it."""

    def __init__(self, table: pa.Table, name: str, directory: Path, fingerprint: str, stamp: Any) -> None:
        self.table = table
        self.name, self.directory, self.fingerprint, self.stamp = name, directory, fingerprint, stamp

    def __len__(self) -> int:
        return self.table.num_rows

    def read(self, index: int) -> dict[str, Any]:
        return _read_row(self.table, index)


class DatasetRows(DataSource):
    """A `datasets.Dataset` made by a script, with its order and selection of rows. Images stay encoded until a row is
    used; if the dataset has a custom transform, its output is the row."""

    directory, stamp = Path("."), None

    def __init__(self, dataset: Any, name: str) -> None:
        self.name, self.transformed = name, dataset.format["type"] == "custom"
        self.rows = dataset if self.transformed else dataset.with_format("arrow")
        self.fingerprint = rows_fingerprint(self.read(index) for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        if not self.transformed:
            return _read_row(self.rows[index : index + 1], 0)
        try:
            return dict(self.rows[index])
        except Exception as error:  # whatever the user's transform raises
            raise RowError(f"its transform fails: {type(error).__name__}: {one_line(error)}") from error


def is_dataset(data: Any) -> bool:
    """Whether `data` is a `datasets.Dataset`; nobody has one without importing the library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


class GroupedRows(DataSource):
    """A file of row groups. Reading a row decodes its group; the group read last stays in memory.

    The file is not memory-mapped: mapped pages count as memory of every process that touches them, and images touch
    all of them.
    """

    def __init__(
        self, path: Path, fingerprint: str, ends: list[int], reader: Callable[[], Callable[[int], pa.Table]]
    ) -> None:
        self.name, self.directory, self.stamp = str(path), path.parent, file_stamp(path)
        self.fingerprint = fingerprint
        self.ends = ends  # rows up to the end of each group
        self._open_reader = reader
        self._lock = threading.Lock()
        self._reader: tuple[int, Callable[[int], pa.Table]] | None = None  # process id that opened it, and the reader
        self._group: tuple[int, pa.Table] | None = None  # a scan reads every row of a group in turn

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self.ends, index)
        start = self.ends[group - 1] if group else 0
        return _read_row(self._read_group(group), index - start)

    def _read_group(self, group: int) -> pa.Table:
        with self._lock:
            try:
                if self._reader is None or self._reader[0] != os.getpid():
                    self._reader = os.getpid(), self._open_reader()
                if self._group is None or self._group[0] != group:
                    self._group = group, self._reader[1](group)
            except UNREADABLE as error:
                raise RowError(f"its row group cannot be read ({one_line(error)})") from error
            return self._group[1]


def open_parquet(path: Path, cache: DiskCache) -> GroupedRows:
    """Open the file itself, or an Arrow copy in the cache if its row groups are too large to read single rows."""
    try:
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise ValueError("its row counts do not add up")
        stamp = file_stamp(path)
        fingerprint = _cached_fingerprint(cache, stamp, lambda: file_fingerprint(path))
        if all(group.total_byte_size <= MAX_ROW_GROUP for group in groups):
            return GroupedRows(path, fingerprint, list(accumulate(counts)), lambda: _open_parquet_reader(path, stamp))
        copy, ends = _make_arrow_copy(path, fingerprint, cache)
        return GroupedRows(path, fingerprint, ends, lambda: _open_copy_reader(copy))
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}") from error


def _open_parquet_reader(path: Path, stamp: tuple[str, int, int]) -> Callable[[int], pa.Table]:
    if file_stamp(path) != stamp:  # a process that prepares prompts opens the file later
        raise ValueError("the file has changed since the run began; restore it, or start a new run")
    file = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
    return lambda group: file.read_row_group(group, use_threads=False)  # a forked process has no threads


def _open_copy_reader(copy: Path) -> Callable[[int], pa.RecordBatch]:
    file = pa.ipc.open_file(pa.OSFile(str(copy)))

    def read(group: int) -> pa.RecordBatch:
        try:
            batch = file.get_batch(group)
            batch.validate(full=True)
        except UNREADABLE as error:
            raise ValueError(f"the copy {copy} is damaged; remove it: {one_line(error)}") from error
        return batch

    return read


def _make_arrow_copy(path: Path, fingerprint: str, cache: DiskCache) -> tuple[Path, list[int]]:
    """Stream the file once into an uncompressed Arrow file of batches of about 1 MiB; also return their ends."""
    copy = cache.path("arrow", fingerprint, "arrow")
    entry = cache.load("arrow", fingerprint)
    if entry is not None and copy.is_file():
        if "stamp" in entry and entry["stamp"].tolist() == list(file_stamp(copy)[1:]):
            return copy, entry["ends"].tolist()
        logger.warning("%s has changed since it was written; it is made again", copy)
    logger.warning("%s has large row groups; writing an Arrow copy for reading single rows to %s", path, copy)
    # A small buffer, so that no whole column chunk is in memory.
    parquet = pq.ParquetFile(path, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True)
    size = sum(parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups))
    rows = max(1, parquet.metadata.num_rows * MIB // max(1, size))
    counts = []
    with atomic_write(copy) as out, pa.ipc.new_file(out, parquet.schema_arrow) as writer:
        for batch in parquet.iter_batches(batch_size=min(rows, 4096), use_threads=False):
            writer.write_batch(batch)
            counts.append(batch.num_rows)
    pa.default_memory_pool().release_unused()  # before workers are forked from this process
    ends = np.cumsum(counts)
    cache.store("arrow", fingerprint, {"ends": ends, "stamp": np.array(file_stamp(copy)[1:])})
    return copy, ends.tolist()


def open_saved_dataset(directory: Path, cache: DiskCache) -> ArrowRows:
    """Open a `save_to_disk` directory. Its Arrow files are plain streams, so `datasets` is not needed."""
    try:
        files = _read_data_files(directory / "state.json")
        stamp = [file_stamp(file) for file in files]
        table = pa.concat_tables([_map_table(file) for file in files])
        fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(f"{directory} cannot be read as a saved dataset: {one_line(error)}") from error
    return ArrowRows(table, str(directory), directory, fingerprint, stamp)


def _read_data_files(state: Path) -> list[Path]:
    """Return the files that `state.json` lists, which lie beside it."""
    try:
        content = json.loads(regular_file(state).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested deeply
        raise DataError(f"{state} is not valid JSON: {one_line(error)}") from error
    entries = content.get("_data_files") if isinstance(content, dict) else None
    entries = entries if isinstance(entries, list) else []
    names = [str(entry["filename"]) for entry in entries if isinstance(entry, dict) and entry.get("filename")]
    if not names or len(names) < len(entries):
        raise DataError(f"{state} does not list its files as _data_files: [{{filename: ..}}]; save the dataset again")
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{state} names a file outside its folder ({shorten(name)}); save the dataset again")
    return [state.parent / name for name in names]


def open_arrow(path: Path, cache: DiskCache) -> ArrowRows:
    """Open one Arrow file: a stream, as in the cache of `datasets`, or the format with a footer."""
    table, stamp = _map_table(path), file_stamp(path)
    fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    return ArrowRows(table, str(path), path.parent, fingerprint, stamp)


def _map_table(file: Path) -> pa.Table:
    """Memory-map an Arrow file and validate it fully: a damaged offset would make the reader leave its memory."""
    try:
        mapped = pa.memory_map(str(regular_file(file)))
        with_footer = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        table = (pa.ipc.open_file if with_footer else pa.ipc.open_stream)(mapped).read_all()
        table.validate(full=True)
    except UNREADABLE as error:
        raise DataError(f"{file} is damaged, or not an Arrow file: {one_line(error)}") from error
    return table


def open_hub_dataset(name: str, split: str | None, cache: DiskCache, config: str | None = None) -> ArrowRows:
    """Open a dataset of the Hugging Face hub, or one of its configurations, downloaded or from the hub's cache."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name!r} is not a file here; to read it from the hub: pip install 'mtrl[hub]'") from error
    try:
        loaded = datasets.load_dataset(name, *([config] if config else []), split=split)
    except Exception as error:  # the hub raises many errors, all about this name, split or connection
        raise DataError(f"the dataset {name!r} (split {split or 'any'}) cannot be loaded: {error}") from error
    if split is None:
        if len(loaded) != 1:
            raise DataError(several_splits_message(name, loaded))
        (split,) = loaded
        loaded = loaded[split]
    files = [file_stamp(Path(entry["filename"])) for entry in loaded.cache_files]
    stamp = [*files, [name, split, config]] if files else None
    table = loaded.data.table
    try:
        table.validate(full=True)
    except UNREADABLE as error:
        where = ", ".join(path for path, _, _ in files) or "in memory"
        raise DataError(f"the dataset {name!r} ({where}) is damaged; remove it there: {one_line(error)}") from error
    fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    return ArrowRows(table, f"{name}@{split}", Path("."), fingerprint, stamp)


def several_splits_message(name: str, splits: Iterable[str]) -> str:
    names = sorted(splits)
    return f"{name} has several splits ({', '.join(names)}); name one, as in {name}@{names[0]}"


def rows_fingerprint(rows: Iterable[Any]) -> str:
    """Hash every value of decoded rows; of long binary values only the length and both ends."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        try:
            digest.update(json.dumps(row, default=_to_json).encode())
        except (ValueError, RecursionError) as error:  # nested too deep, or in itself; the scan reports the row
            digest.update(str(error).encode())
    return digest.hexdigest()


def table_fingerprint(table: pa.Table) -> str:
    batches = table.to_batches(max_chunksize=256)
    return rows_fingerprint(batch.slice(i, 1).to_pylist()[0] for batch in batches for i in range(batch.num_rows))


def _to_json(value: Any) -> Any:
    """Describe a value that JSON does not have: binary values, images, dates and the like."""
    if hasattr(value, "tobytes") and not isinstance(value, memoryview):  # a PIL image, a numpy array
        try:
            return [type(value).__name__, str(getattr(value, "size", "")), _to_json(value.tobytes())]
        except OSError as error:  # a broken image; the scan reports the row
            return [type(value).__name__, str(error)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        data, half = bytes(value), MAX_HASHED_BYTES // 2
        ends = data if len(data) <= MAX_HASHED_BYTES else data[:half] + data[-half:]
        return ["bytes", len(data), hashlib.blake2b(ends, digest_size=8).hexdigest()]
    return [type(value).__name__, str(value)]


def file_fingerprint(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while block := file.read(8 * MIB):
            digest.update(block)
    return digest.hexdigest()


def _cached_fingerprint(cache: DiskCache, stamp: Any, make: Callable[[], str]) -> str:
    entry = cache.get("fingerprint", stamp, {"fingerprint"}, lambda: {"fingerprint": pack_json(make())})
    return str(unpack_json(entry["fingerprint"]))


def _read_row(table: pa.Table, index: int) -> dict[str, Any]:
    if index >= table.num_rows:
        raise RowError("it cannot be read (its table ends before it)")
    try:
        row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    except UNREADABLE as error:
        raise RowError(f"it cannot be read ({one_line(error)})") from error
    return row
