"""WebDataset: a tar whose members `0001.jpg`, `0001.json`, `0001.txt` are one row; the name before the first dot is its
key. Members are found once and read where they lie; nothing is unpacked."""

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
from mtrl.data.row_settings import DataError, RowError

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
NEEDED = {"first", "start", "size", "field", "fields", "keys", "fingerprint"}


class TarRows:
    """A row has the members of its `json`; its images, in the order of their names, as `images`; `answer.txt` as
    `answer`; `cls` as a number; and other members by their ending, as bytes."""

    def __init__(self, path: Path, cache: DiskCache, fingerprint: Callable[[], str]) -> None:
        self.name, self.directory, self.stamp = str(path), path.parent, file_stamp(path)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        index = cache.load("tar", self.stamp)
        if index is None or NEEDED - index.keys():
            index = _index(path) | {"fingerprint": pack_json(fingerprint())}
            cache.store("tar", self.stamp, index)
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
            field, data = self.fields[int(self.field[member])], self._data(member)
            if f".{field}".endswith(IMAGE_ENDINGS):
                images[field] = data
            else:
                row |= _columns(field, data)
        if images:
            row = {name: value for name, value in row.items() if name != "image" or not isinstance(value, str)}
            row["images"] = [images[field] for field in sorted(images, key=_natural)]
        return row

    def row_number(self, index: int) -> int:
        return index + 1

    def _data(self, member: int) -> bytes:
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
    """Where each member begins, how long it is, its field, and at which member each row begins."""
    with path.open("rb") as file:
        if file.read(8).startswith(COMPRESSED):
            raise DataError(f"{path} is compressed, so its rows cannot be reached singly; unpack it to a plain .tar")
    keys: list[str] = []
    numbers: dict[str, list[int]] = {"first": [], "start": [], "size": [], "field": []}
    fields: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                found = re.fullmatch(r"((?:.*/)?[^./][^./]*)\.([^/]+)", member.name.removeprefix("./"))
                if not member.isreg() or found is None:
                    continue
                key, ending = found[1], found[2].lower()
                if not keys or keys[-1] != key:
                    keys.append(key)
                    numbers["first"].append(len(numbers["start"]))
                numbers["start"].append(member.offset_data)
                numbers["size"].append(member.size)
                numbers["field"].append(fields.setdefault(ending, len(fields)))
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error
    numbers["first"].append(len(numbers["start"]))
    index = {name: np.array(values, np.int64) for name, values in numbers.items()}
    return index | {"fields": pack_json(list(fields)), "keys": pack_json(keys)}


def _natural(field: str) -> list[tuple[int, str]]:
    """So that 10.png comes after 2.png."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", field)]
