"""WebDataset: the members `0001.jpg`, `0001.json`, `0001.txt` of a tar are one row; the name before the first dot is
its key. Members are indexed once and read in place; nothing is unpacked."""

from __future__ import annotations

import json
import os
import re
import tarfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.data.cache import DiskCache, file_stamp, pack_json, unpack_json
from mtrl.data.media import IMAGE_ENDINGS
from mtrl.data.row_settings import DataError, DataSource, RowError

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
INDEX = {"first", "start", "size", "field", "fields", "keys", "fingerprint"}
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # key, field


class TarRows(DataSource):
    """The columns of a row: the fields of its `json`; its images as `images`, sorted by name; `answer.txt` as `answer`;
    `cls` as a number; other members under their ending, as bytes."""

    def __init__(self, path: Path, cache: DiskCache, fingerprint: Callable[[], str]) -> None:
        self.name, self.directory, self.stamp = str(path), path.parent, file_stamp(path)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        index = cache.get("tar", self.stamp, INDEX, lambda: _index(path) | {"fingerprint": pack_json(fingerprint())})
        self.first, self.start, self.size, self.field = (index[name] for name in ("first", "start", "size", "field"))
        self.fields: list[str] = unpack_json(index["fields"])
        self.keys: list[str] = unpack_json(index["keys"])
        self.fingerprint: str = unpack_json(index["fingerprint"])

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {"__key__": self.keys[index]}
        images: dict[str, bytes] = {}
        for member in range(int(self.first[index]), int(self.first[index + 1])):
            field, data = self.fields[int(self.field[member])], self._read_member(member)
            if f".{field}".endswith(IMAGE_ENDINGS):
                images[field] = data
            else:
                row |= _columns(field, data)
        if images:
            row = {name: value for name, value in row.items() if name != "image" or not isinstance(value, str)}
            row["images"] = [images[field] for field in sorted(images, key=_natural_order)]
        return row

    def _read_member(self, member: int) -> bytes:
        data = os.pread(self._file, int(self.size[member]), int(self.start[member]))
        if len(data) < self.size[member]:
            raise RowError("it cannot be read (its tar ends before it)")
        return data


def _columns(field: str, data: bytes) -> dict[str, Any]:
    name, _, ending = field.rpartition(".")
    try:
        if ending == "json":
            value = json.loads(data.decode("utf-8-sig"))
            return value if not name and isinstance(value, dict) else {name or "json": value}
        if ending in ("txt", "text"):
            return {name or "txt": data.decode("utf-8-sig").strip()}
        if ending == "cls":
            return {name or "cls": int(data.strip())}
    except (ValueError, RecursionError) as error:
        raise RowError(f"its member .{field} cannot be read ({error})") from error
    return {field: data}


def _index(path: Path) -> dict[str, np.ndarray]:
    """Find the start, size and field of each member, and the first member of each row."""
    with path.open("rb") as file:
        if file.read(8).startswith(COMPRESSED):
            raise DataError(f"{path} is compressed, so single rows cannot be read; unpack it to a plain .tar")
    keys: list[str] = []
    numbers: dict[str, list[int]] = {"first": [], "start": [], "size": [], "field": []}
    fields: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all in memory
                match = MEMBER.fullmatch(member.name.removeprefix("./"))
                if not member.isreg() or match is None:
                    continue
                key, field = match[1], match[2].lower()
                if not keys or keys[-1] != key:
                    keys.append(key)
                    numbers["first"].append(len(numbers["start"]))
                numbers["start"].append(member.offset_data)
                numbers["size"].append(member.size)
                numbers["field"].append(fields.setdefault(field, len(fields)))
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error
    numbers["first"].append(len(numbers["start"]))
    index = {name: np.array(values, np.int64) for name, values in numbers.items()}
    return index | {"fields": pack_json(list(fields)), "keys": pack_json(keys)}


def _natural_order(field: str) -> list[tuple[int, str]]:
    """Sort 10.png after 2.png."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", field)]
