"""Rows of Parquet and Arrow tables, read lazily: images stored as bytes stay on disk until a row is asked for."""

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

from mtrl.data.cache import DiskCache, file_stamp, pack_json, replacing, unpack_json
from mtrl.data.row_settings import DataError, RowError
from mtrl.utils.files import regular_file

MIB = 1 << 20
MAX_ROW_GROUP = 8 * MIB  # bytes; a larger row group is too slow to decode for a single row
HASHED_VALUE = MIB // 8
UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)  # ValueError: also bad UTF-8

logger = logging.getLogger(__name__)


class ArrowRows:
    """A memory-mapped table: what `datasets` makes."""

    def __init__(self, table: pa.Table, name: str, directory: Path, fingerprint: str, stamp: Any) -> None:
        self.table = table
        self.name, self.directory, self.fingerprint, self.stamp = name, directory, fingerprint, stamp

    def __len__(self) -> int:
        return self.table.num_rows

    def read(self, index: int) -> dict[str, Any]:
        return _row(self.table, index)

    def row_number(self, index: int) -> int:
        return index + 1


class DatasetRows:
    """A `datasets.Dataset` that a script made, with its order and choice of rows. Images stay as they are stored until
    a row is used, unless the dataset has a transform of its own: then a row is what that makes of it."""

    directory, stamp = Path("."), None

    def __init__(self, dataset: Any, name: str) -> None:
        self.name, self.transformed = name, dataset.format["type"] == "custom"
        self.rows = dataset if self.transformed else dataset.with_format("arrow")
        self.fingerprint = rows_fingerprint(self.read(index) for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        if not self.transformed:
            return _row(self.rows[index : index + 1], 0)
        try:
            return dict(self.rows[index])
        except Exception as error:  # whatever the user's transform raises
            raise RowError(f"its transform fails: {type(error).__name__}: {_one_line(error)}") from error

    def row_number(self, index: int) -> int:
        return index + 1


def is_dataset(data: Any) -> bool:
    """Whether it is of the library `datasets`, which whoever made one has imported."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


class GroupedRows:
    """A file of row groups: the group of the asked row is read and decoded, the last one is kept.

    Not mapped: mapped pages count as memory of every process that touches them, and images touch them all.
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
        self._group: tuple[int, pa.Table] | None = None  # the group read last: a scan goes through it row by row

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self.ends, index)
        start = self.ends[group - 1] if group else 0
        return _row(self._read_group(group), index - start)

    def row_number(self, index: int) -> int:
        return index + 1

    def _read_group(self, group: int) -> pa.Table:
        with self._lock:
            try:
                if self._reader is None or self._reader[0] != os.getpid():
                    self._reader = os.getpid(), self._open_reader()
                if self._group is None or self._group[0] != group:
                    self._group = group, self._reader[1](group)
            except UNREADABLE as error:
                raise RowError(f"its row group cannot be read ({_one_line(error)})") from error
            return self._group[1]


def open_parquet(path: Path, cache: DiskCache) -> GroupedRows:
    """The file itself, or an Arrow copy of it in the cache when its row groups are too large to reach a single row."""
    try:
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise ValueError("its row counts do not add up")
        fingerprint = _cached_fingerprint(cache, file_stamp(path), lambda: file_fingerprint(path))
        if all(group.total_byte_size <= MAX_ROW_GROUP for group in groups):
            return GroupedRows(path, fingerprint, list(accumulate(counts)), lambda: _parquet_reader(path))
        copy, ends = _arrow_copy(path, fingerprint, cache)
        return GroupedRows(path, fingerprint, ends, lambda: _copy_reader(copy))
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as Parquet: {_one_line(error)}") from error


def _parquet_reader(path: Path) -> Callable[[int], pa.Table]:
    file = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)  # where the writer left checksums
    return lambda group: file.read_row_group(group, use_threads=False)  # a forked process has no threads


def _copy_reader(copy: Path) -> Callable[[int], pa.RecordBatch]:
    file = pa.ipc.open_file(pa.OSFile(str(copy)))

    def read(group: int) -> pa.RecordBatch:
        try:
            batch = file.get_batch(group)
            batch.validate(full=True)
        except UNREADABLE as error:
            raise ValueError(f"the copy {copy} is damaged; remove it: {_one_line(error)}") from error
        return batch

    return read


def _arrow_copy(path: Path, fingerprint: str, cache: DiskCache) -> tuple[Path, list[int]]:
    """Streams the file, once, into an uncompressed Arrow file of batches of about a MiB; also the ends of these."""
    copy = cache.path("arrow", fingerprint, "arrow")
    known = cache.load("arrow", fingerprint)
    if known is not None and copy.is_file():
        if "stamp" in known and known["stamp"].tolist() == list(file_stamp(copy)[1:]):
            return copy, known["ends"].tolist()
        logger.warning("%s has changed since it was written; it is made again", copy)
    logger.warning("%s has large row groups; an Arrow copy for reading single rows goes to %s", path, copy)
    # The buffer is small, so that no whole column chunk is held.
    parquet = pq.ParquetFile(path, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True)
    size = sum(parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups))
    rows = max(1, parquet.metadata.num_rows * MIB // max(1, size))
    counts = []
    with replacing(copy) as out, pa.ipc.new_file(out, parquet.schema_arrow) as writer:
        for batch in parquet.iter_batches(batch_size=min(rows, 4096), use_threads=False):
            writer.write_batch(batch)
            counts.append(batch.num_rows)
    pa.default_memory_pool().release_unused()  # before workers are forked from this process
    ends = np.cumsum(counts)
    cache.store("arrow", fingerprint, {"ends": ends, "stamp": np.array(file_stamp(copy)[1:])})
    return copy, ends.tolist()


def open_saved_dataset(directory: Path, cache: DiskCache) -> ArrowRows:
    """A `save_to_disk` copy. Its Arrow files are plain streams, so reading them needs no `datasets`."""
    try:
        state = json.loads(regular_file(directory / "state.json").read_text())
        files = [directory / entry["filename"] for entry in state["_data_files"]]
        stamp = [file_stamp(file) for file in files]
        table = pa.concat_tables([_mapped(file) for file in files])
        fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    except DataError:
        raise
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise DataError(f"{directory} cannot be read as a saved dataset: {_one_line(error)}") from error
    return ArrowRows(table, str(directory), directory, fingerprint, stamp)


def open_arrow(path: Path, cache: DiskCache) -> ArrowRows:
    """One Arrow file, as `datasets` keeps them in its cache, or of the kind with a footer."""
    table, stamp = _mapped(path), file_stamp(path)
    fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    return ArrowRows(table, str(path), path.parent, fingerprint, stamp)


def _mapped(file: Path) -> pa.Table:
    """The table of an Arrow file, checked whole: a damaged offset would lead the reader out of its memory."""
    try:
        mapped = pa.memory_map(str(regular_file(file)))
        with_footer = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        table = (pa.ipc.open_file if with_footer else pa.ipc.open_stream)(mapped).read_all()
        table.validate(full=True)
    except UNREADABLE as error:
        raise DataError(f"{file} is damaged, or no Arrow file: {_one_line(error)}") from error
    return table


def open_hub_dataset(name: str, split: str | None, cache: DiskCache, config: str | None = None) -> ArrowRows:
    """A dataset of the Hugging Face hub, or one configuration of it, downloaded or from its cache."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name!r} is no file here; to read it from the hub: pip install 'mtrl[hub]'") from error
    try:
        loaded = datasets.load_dataset(name, *([config] if config else []), split=split)
    except Exception as error:  # the hub's many errors, all of them about this name, split or connection
        raise DataError(f"the dataset {name!r} (split {split or 'any'}) cannot be loaded: {error}") from error
    if split is None:
        if len(loaded) != 1:
            raise DataError(several_splits(name, loaded))
        (split,) = loaded
        loaded = loaded[split]
    files = [file_stamp(Path(entry["filename"])) for entry in loaded.cache_files]
    stamp = [*files, [name, split, config]] if files else None
    table = loaded.data.table
    try:
        table.validate(full=True)
    except UNREADABLE as error:
        where = ", ".join(path for path, _, _ in files) or "in memory"
        raise DataError(f"the dataset {name!r} ({where}) is damaged; remove it there: {_one_line(error)}") from error
    fingerprint = _cached_fingerprint(cache, stamp, lambda: table_fingerprint(table))
    return ArrowRows(table, f"{name}@{split}", Path("."), fingerprint, stamp)


def several_splits(name: str, splits: Iterable[str]) -> str:
    names = sorted(splits)
    return f"{name} has several splits ({', '.join(names)}); name one, as in {name}@{names[0]}"


def rows_fingerprint(rows: Iterable[Any]) -> str:
    """A hash of every value of decoded rows; long binary values count with their length and both ends."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        try:
            digest.update(json.dumps(row, default=_spell).encode())
        except (ValueError, RecursionError) as error:  # nested too deep, or in itself; the scan says so with its row
            digest.update(str(error).encode())
    return digest.hexdigest()


def table_fingerprint(table: pa.Table) -> str:
    batches = table.to_batches(max_chunksize=256)
    return rows_fingerprint(batch.slice(i, 1).to_pylist()[0] for batch in batches for i in range(batch.num_rows))


def _spell(value: Any) -> Any:
    """Text for what JSON cannot spell: binary values, images, dates and the like."""
    if hasattr(value, "tobytes") and not isinstance(value, memoryview):  # a PIL image, a numpy array
        try:
            return [type(value).__name__, str(getattr(value, "size", "")), _spell(value.tobytes())]
        except OSError as error:  # a broken image; the scan says so with its row
            return [type(value).__name__, str(error)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        ends = data if len(data) <= HASHED_VALUE else data[: HASHED_VALUE // 2] + data[-HASHED_VALUE // 2 :]
        return ["bytes", len(data), hashlib.blake2b(ends, digest_size=8).hexdigest()]
    return [type(value).__name__, str(value)]


def file_fingerprint(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while block := file.read(8 * MIB):
            digest.update(block)
    return digest.hexdigest()


def _cached_fingerprint(cache: DiskCache, stamp: Any, make: Callable[[], str]) -> str:
    if stamp is None:
        return make()
    entry = cache.load("fingerprint", stamp)
    if entry is not None and "fingerprint" in entry:
        return str(unpack_json(entry["fingerprint"]))
    fingerprint = make()
    cache.store("fingerprint", stamp, {"fingerprint": pack_json(fingerprint)})
    return fingerprint


def _row(table: pa.Table, index: int) -> dict[str, Any]:
    if index >= table.num_rows:
        raise RowError("it cannot be read (its table ends before it)")
    try:
        row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    except UNREADABLE as error:
        raise RowError(f"it cannot be read ({_one_line(error)})") from error
    return row


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
