"""Sources of rows: JSONL, JSON, Parquet, Arrow, WebDataset tars, directories of them, Hugging Face datasets.

    sources = open_sources("a.jsonl, photos/, lmms-lab/AI2D@test", DiskCache())

A source does not load its rows into memory: JSONL stores byte offsets, Parquet reads one row group at a time, Arrow is
memory-mapped. Only a `.json` array is loaded whole.

A fingerprint identifies the *content*, so ids survive a move or a copy and change with an edit. Files are hashed whole,
JSONL in the pass that finds its lines, so that one changed label shows. (About two seconds per gigabyte, once: the scan
reads everything anyway, and the result is cached by path, size and mtime.) For Hugging Face datasets every value is
hashed, since the library may write the same rows into different files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.data.arrow import (
    file_fingerprint,
    open_arrow,
    open_hub_dataset,
    open_parquet,
    open_saved_dataset,
    rows_fingerprint,
    several_splits_message,
)
from mtrl.data.cache import DiskCache, file_stamp
from mtrl.data.row_settings import DataError, DataSource, RowError, check_object
from mtrl.data.tars import TarRows
from mtrl.utils.files import regular_file

SPLIT_NAMES = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
BLOCK = 8 << 20  # bytes read at once while lines are indexed
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SHARD_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")  # shards as WebDataset names them


class JsonlSource(DataSource):
    """One JSON object per line. Blank lines are skipped but counted, so a row number is the editor's line number."""

    def __init__(self, path: Path, cache: DiskCache) -> None:
        self.path, self.name, self.directory, self.stamp = path, str(path), path.parent, file_stamp(path)
        self._file = os.open(path, os.O_RDONLY)  # stays open: an editor that replaces the file cannot shift our offsets
        weakref.finalize(self, os.close, self._file)
        arrays = {"start", "end", "line", "digest"}
        index = cache.get("lines", self.stamp, arrays, lambda: _index_lines(self._file))
        self.start, self.end, self.line = index["start"], index["end"], index["line"]
        self.fingerprint = index["digest"].tobytes().hex()

    def __len__(self) -> int:
        return len(self.line)

    def read(self, index: int) -> dict[str, Any]:
        start, end = int(self.start[index]), int(self.end[index])
        line = os.pread(self._file, end - start, start)  # no shared position: threads and forks may read
        return _json_object(line)

    def row_number(self, index: int) -> int:
        return int(self.line[index])


class RowList(DataSource):
    """Rows in memory: a `.json` array, or rows given in Python."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], name: str = "rows", directory: Path = Path("."), stamp: Any = None
    ) -> None:
        self.rows, self.name, self.directory, self.stamp = rows, name, directory, stamp
        self.fingerprint = rows_fingerprint(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return check_object(self.rows[index])


def open_sources(spec: str, cache: DiskCache) -> list[DataSource]:
    """Open `a.jsonl`, `photos/`, `data/@test`, `org/name@split`, or several of these separated by commas."""
    items = [spec] if os.path.exists(spec) else [item.strip() for item in spec.split(",") if item.strip()]
    if not items or not spec.strip():
        raise DataError("no data file is named; set dataset.train_files")
    sources = [source for item in items for source in _open_item(item, cache)]
    seen: Counter[str] = Counter()
    for source in sources:  # ids must differ even if the same content is named twice
        seen[source.fingerprint] += 1
        if seen[source.fingerprint] > 1:
            source.fingerprint += f".{seen[source.fingerprint]}"
    return sources


def _open_item(item: str, cache: DiskCache) -> Iterator[DataSource]:
    name, split = _parse_item(item)
    path = Path(name).expanduser()
    if os.path.isdir(path):
        yield from _open_directory(path, split, cache)
    elif os.path.exists(path):
        if split not in (None, "train"):
            raise DataError(f"{name} is one file and has no split {split!r}")
        yield _open_file(path, cache)
    elif shards := SHARD_RANGE.search(name):
        for number in range(int(shards[1]), int(shards[2]) + 1):
            yield from _open_item(name.replace(shards[0], str(number).zfill(len(shards[1]))), cache)
    elif HUB_ID.fullmatch(name) and path.suffix not in OPENERS:
        yield open_hub_dataset(name, split, cache)
    else:
        raise DataError(f"{name} does not exist")


def _parse_item(item: str) -> tuple[str, str | None]:
    if os.path.exists(os.path.expanduser(item)) or "@" not in item:
        return item, None
    name, _, split = item.rpartition("@")
    return name, split


def _open_directory(path: Path, split: str | None, cache: DiskCache) -> Iterator[DataSource]:
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").exists())
        path = path / _choose_split(str(path), split, splits)
        split = None
    if (path / "state.json").exists():
        yield open_saved_dataset(path, cache)
        return
    for file in list_files(path, split):
        yield _open_file(file, cache)


def list_files(path: Path, split: str | None, is_split_optional: bool = False) -> list[Path]:
    """List the data files of one split under a directory. With an optional split, all of them if no file name
    contains a split."""
    found = sorted(file for file in path.rglob("*") if file.suffix in OPENERS and not file.is_dir())
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    kinds = ((".jsonl", ".parquet"), (".tar",), (".arrow",))  # not .json, which most often describes the others
    files = next(filter(None, ([file for file in found if file.suffix in kind] for kind in kinds)), [])
    if not files:
        raise DataError(f"{path} holds no .jsonl or .parquet file, no .tar and no .arrow")
    split_names = {file: _find_split(file.relative_to(path), split) for file in files}
    splits = sorted({name for name in split_names.values() if name})
    if len(splits) > 1 or (split is not None and (splits or not is_split_optional)):
        split = _choose_split(str(path), split, splits)
        files = [file for file in files if split_names[file] == split]
    return files


def _choose_split(name: str, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) != 1:
        raise DataError(several_splits_message(name, splits))
    if split is not None and split not in splits:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(splits) or 'none'}")
    return split or splits[0]


def _find_split(file: Path, requested: str | None = None) -> str | None:
    """Find the split in a file's name or directory, as hub repositories name them.

    >>> [_find_split(Path(name)) for name in ("data/testmini-00000-of-00002.parquet", "train/a.jsonl", "a.jsonl")]
    ['testmini', 'train', None]
    """
    for part in (file.stem, *reversed(file.parent.parts)):
        if shard := re.match(r"(.+?)-\d{5}-of-\d{5}", part):
            return shard[1]
        head = re.split(r"[-_.]", part)[0]
        if part == requested or head in SPLIT_NAMES:
            return requested if part == requested else head
    return None


def _open_file(path: Path, cache: DiskCache) -> DataSource:
    if path.suffix not in OPENERS:
        raise DataError(f"{path} has none of the endings that can be read ({', '.join(OPENERS)})")
    try:
        return OPENERS[path.suffix](regular_file(path), cache)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_json(path: Path, cache: DiskCache) -> DataSource:
    """Open a `.json` file: an array of objects, or JSONL under another name."""
    with path.open("rb") as file:
        if not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return JsonlSource(path, cache)
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return RowList(rows, str(path), path.parent, file_stamp(path))


OPENERS: dict[str, Callable[[Path, DiskCache], DataSource]] = {
    ".jsonl": JsonlSource,
    ".json": _open_json,
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    ".tar": lambda path, cache: TarRows(path, cache, lambda: file_fingerprint(path)),
}


def _index_lines(descriptor: int) -> dict[str, np.ndarray]:
    """Find where every line begins and ends, its number, and the hash of all bytes, in one pass."""
    digest = hashlib.blake2b(digest_size=8)
    breaks, offset = [], 0
    while block := os.pread(descriptor, BLOCK, offset):
        digest.update(block)
        breaks.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + offset)
        offset += len(block)
    end = np.concatenate([*breaks, np.array([offset])]).astype(np.int64)
    start = np.concatenate([np.zeros(1, dtype=np.int64), end[:-1] + 1])
    filled = end > start
    for i in np.flatnonzero(filled & (end - start <= 8)):  # too short for a row, so perhaps only whitespace
        filled[i] = bool(os.pread(descriptor, int(end[i] - start[i]), int(start[i])).strip())
    line = np.flatnonzero(filled) + 1
    code = np.frombuffer(digest.digest(), dtype=np.uint8)
    return {"start": start[filled], "end": end[filled], "line": line, "digest": code}


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"it is not valid JSON ({error})") from error
    return check_object(value)
