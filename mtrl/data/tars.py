"""WebDataset: the members `0001.jpg`, `0001.json`, `0001.txt` of a tar are one row; the name before the first dot is
its key. Members are indexed once and read in place; nothing is unpacked. A member that cannot be read makes its row a
bad one; the others are read."""

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
from mtrl.data.row_settings import DataError, DataSource, RowError, check_object, one_line

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
INDEX = {"first", "start", "size", "field", "fields", "keys", "problems", "fingerprint"}
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # key, field


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
        self.problems: dict[int, str] = dict(unpack_json(index["problems"]))
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
        return check_object(row)

    def _read_member(self, member: int) -> bytes:
        if member in self.problems:
            raise RowError(self.problems[member])
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


class _Index:
    """The members of a tar: where each starts, its size and field, and the first member of each row."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: dict[str, int] = {}
        self.numbers: dict[str, list[int]] = {"first": [], "start": [], "size": [], "field": []}
        self.problems: dict[int, str] = {}  # why a member cannot be read

    def add(self, key: str, field: str, start: int, size: int, problem: str | None = None) -> None:
        members = len(self.numbers["start"])
        if not self.keys or self.keys[-1] != key:
            self.keys.append(key)
            self.numbers["first"].append(members)
        if problem is not None:
            self.problems[members] = problem
            start = size = 0  # a damaged header may state any number
        self.numbers["start"].append(start)
        self.numbers["size"].append(size)
        self.numbers["field"].append(self.fields.setdefault(field, len(self.fields)))

    def spoil_last_row(self, problem: str) -> None:
        """The row before a damage may lack members, such as its image."""
        self.problems[self.numbers["first"][-1]] = problem

    def spoil_divided_rows(self) -> None:
        """Members that are not next to each other, such as 0.txt 1.txt 0.png 1.png: each part looks like a row."""
        parts: dict[str, list[int]] = {}
        for row, key in enumerate(self.keys):
            parts.setdefault(key, []).append(row)
        first = [*self.numbers["first"], len(self.numbers["start"])]
        for rows in parts.values():
            if len({tuple(sorted(self.numbers["field"][first[row] : first[row + 1]])) for row in rows}) > 1:
                problem = "its members are not next to each other; pack them sorted (tar --sort=name)"
                self.problems |= {first[row]: problem for row in rows}

    def arrays(self) -> dict[str, np.ndarray]:
        numbers = self.numbers | {"first": [*self.numbers["first"], len(self.numbers["start"])]}
        packed = {"fields": list(self.fields), "keys": self.keys, "problems": list(self.problems.items())}
        arrays = {name: np.array(values, np.int64) for name, values in numbers.items()}
        return arrays | {name: pack_json(value) for name, value in packed.items()}


def _index(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        if file.read(8).startswith(COMPRESSED):
            raise DataError(f"{path} is compressed, so single rows cannot be read; unpack it to a plain .tar")
    index = _Index()
    try:
        with tarfile.open(path, "r:") as tar:
            _add_members(index, tar, path.stat().st_size)
    except Exception as error:  # tarfile raises anything on damaged headers
        if not index.keys:
            raise DataError(f"{path} cannot be read as a tar: {one_line(error)}") from error
        index.spoil_last_row(f"it, and whatever follows it, cannot be read as a tar ({one_line(error)}); pack it again")
    index.spoil_divided_rows()
    return index.arrays()


def _add_members(index: _Index, tar: tarfile.TarFile, length: int) -> None:
    """Index all members; raise an error where the rest of the tar cannot be read."""
    last = -1
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # it would keep them all in memory
        if member.offset <= last:  # a negative size leads back, for ever
            raise ValueError(f"the header at byte {last} states an impossible size")
        last = member.offset
        match = MEMBER.fullmatch(member.name.removeprefix("./"))
        if match is not None and not member.isdir():
            field = match[2].lower()
            index.add(match[1], field, member.offset_data, member.size, _find_problem(member, field, length))
    _check_end(Path(str(tar.name)), tar.offset)


def _check_end(path: Path, offset: int) -> None:
    """Raise an error if more than zeros follow: tarfile takes a damaged header for the end."""
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(1 << 20):
            if block.strip(b"\0"):
                at = offset + len(block) - len(block.lstrip(b"\0"))
                raise ValueError(f"its members end at byte {offset}, but there is more at byte {at}: a damaged header, "
                                 "or tars joined by cat")  # fmt: skip
            offset += len(block)


def _find_problem(member: tarfile.TarInfo, field: str, length: int) -> str | None:
    """Return why a member cannot be read in place."""
    if member.issparse():
        return f"its member .{field} is sparse ({member.size} bytes); pack it without --sparse"
    if not member.isreg():
        kind = "a link" if member.islnk() or member.issym() else "no file"
        return f"its member .{field} is {kind}; pack it with --dereference --hard-dereference"
    if not 0 <= member.size <= length - member.offset_data:
        return f"its member .{field} cannot be read (its tar ends before it: {member.size} bytes)"
    return None


def _natural_order(field: str) -> list[tuple[int, str]]:
    """Sort 10.png after 2.png. A number is compared by its digits: int() refuses some, such as very many."""
    parts = re.split(r"([0-9]+)", field)
    digits = [part.lstrip("0") for part in parts[1::2]]
    order = [(-1, part) for part in parts]
    order[1::2] = [(len(each), each) for each in digits]
    return order
