"""The files of a recorded run, `record/part-00001.bin` and so on: a block a step, each readable by itself.

    head    64 bytes: a mark, step, attempt, how many responses, sizes and checksums
    body    images (each once in a part) and responses, each compressed by itself
    table   what is known of the step, as compressed JSON: prompts, rewards, and where in the part each thing lies

A reader walks from head to head and reads nothing else until it is asked; it goes on where it stopped while the file
grows, and after damage it looks for the next mark. Parts are never changed: the oldest are removed whole, with their
images, when all together would pass the limit. Nothing here needs torch, so that a viewer stays small.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.utils.files import regular_file

RECORD = "record"  # the folder of these files in a run's directory
MARK = b"\x89MTRLREC"
HEAD = struct.Struct("<8sQIIQIII20x")  # mark, step, attempt, responses, body bytes, table bytes, table CRC, head CRC
UNSIGNED = struct.Struct("<8sQIIQII")  # the same up to its own checksum
PARTS = 16  # a part is this share of the limit, so that rotation forgets no more than it at once
LARGEST = 64 * 2**20  # bytes of a table or a response: more is damage, or a trap
CHUNK = 2**20

Table = dict[str, Any]


class DamagedRecord(ValueError):
    """A piece of a file that is not what was written."""


def part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.bin"


def block_parts(directory: Path) -> list[Path]:
    """The parts that are there, the oldest first."""
    found = [path for path in directory.glob("part-*.bin") if path.stem.removeprefix("part-").isdecimal()]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("part-")))


def packed(value: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"), 4)


def inflated(data: bytes) -> bytes:
    """Decompressed, within a bound: a few bytes of a strange file may stand for gigabytes."""
    reader = zlib.decompressobj()
    try:
        whole = reader.decompress(data, LARGEST)
    except zlib.error as error:
        raise DamagedRecord(str(error)) from error
    if reader.unconsumed_tail or not reader.eof:
        raise DamagedRecord("it is cut off, or far too large")
    return whole


# ------------------------------------------------------------------------------------------------------------- writing
class BlockWriter:
    """Appends blocks to a part of its own: a new attempt never touches what an earlier one left."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit = directory, limit_bytes
        self._number: int | None = None  # of the part that is written
        self._images: dict[str, list[int]] = {}  # where each image lies in this part

    def append(
        self,
        step: int,
        attempt: int,
        table: Table,
        responses: Sequence[bytes],
        images: Mapping[str, Callable[[], bytes]],
    ) -> None:
        """Writes a step whole, or not at all. An image is encoded only where this part does not hold it yet."""
        path = self._part()
        start = path.stat().st_size if path.exists() else 0
        body, places = bytearray(), {}

        def put(data: bytes) -> list[int]:
            body.extend(data)
            return [start + HEAD.size + len(body) - len(data), len(data), zlib.crc32(data)]

        for key, encode in images.items():
            places[key] = self._images.get(key) or put(encode())
        where = [put(response) for response in responses]
        near = {name: from_here(place, start) for name, place in places.items()}
        lines = packed(table | {"images": near, "where": [from_here(place, start) for place in where]})
        unsigned = UNSIGNED.pack(MARK, step, attempt, len(responses), len(body), len(lines), zlib.crc32(lines))
        head = unsigned + struct.pack("<I20x", zlib.crc32(unsigned))
        self._make_room(path, len(head) + len(body) + len(lines))
        write_whole(path, b"".join((head, body, lines)))
        self._images |= places

    def _part(self) -> Path:
        if self._number is None:
            there = block_parts(self.directory)
            self._number = 1 + (int(there[-1].stem.removeprefix("part-")) if there else 0)
        path = part_path(self.directory, self._number)
        if path.exists() and path.stat().st_size >= self.limit // PARTS:
            self._number, self._images = self._number + 1, {}
            path = part_path(self.directory, self._number)
        elif not path.exists():
            self._images = {}  # somebody removed it, with the images in it
        return path

    def _make_room(self, path: Path, size: int) -> None:
        older = [part for part in block_parts(self.directory) if part != path]
        held = size + sum(part.stat().st_size for part in [*older, *([path] if path.exists() else [])])
        while held > self.limit and older:
            oldest = older.pop(0)
            held -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        if held > self.limit:
            raise OSError(f"a step takes {size / 2**20:.1f} MiB, more than training.record_limit_gib leaves")


def from_here(place: Sequence[int], start: int) -> list[int]:
    """Places count from the block's own start: what lies before it may lose bytes."""
    return [place[0] - start, *place[1:]]


def write_whole(path: Path, data: bytes) -> None:
    """Appends all of the bytes, or leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        before, written = file.tell(), 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


# ------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class Block:
    """A step in a part."""

    part: Path
    start: int
    step: int
    attempt: int
    count: int
    body_bytes: int
    table_bytes: int
    table_crc: int

    @property
    def end(self) -> int:
        return self.start + HEAD.size + self.body_bytes + self.table_bytes

    def table(self) -> Table:
        data = read_at(self.part, self.start + HEAD.size + self.body_bytes, self.table_bytes, self.table_crc)
        try:
            table = json.loads(inflated(data))
        except (ValueError, RecursionError) as error:
            raise DamagedRecord(f"step {self.step}: its table cannot be read") from error
        if not isinstance(table, dict):
            raise DamagedRecord(f"step {self.step}: its table is none")
        return table

    def piece(self, place: Sequence[int]) -> bytes:
        """An image or a response, from where the table says it lies."""
        try:
            at, size, crc = (int(number) for number in place)
        except (TypeError, ValueError) as error:
            raise DamagedRecord("there is no such piece") from error
        return read_at(self.part, self.start + at, size, crc)


def read_at(path: Path, at: int, size: int, crc: int) -> bytes:
    if not 0 <= size <= LARGEST or at < 0:
        raise DamagedRecord(f"{path.name}: a piece of {size} bytes")
    with regular_file(path).open("rb") as file:
        file.seek(at)
        data = file.read(size)
    if len(data) != size or zlib.crc32(data) != crc:
        raise DamagedRecord(f"{path.name}: a piece is damaged or cut off")
    return data


def is_whole(block: Block) -> bool:
    try:
        return bool(block.table())
    except DamagedRecord:
        return False


class Walk:
    """The blocks of one part so far. `advance` goes on where it stopped; `skipped` counts the bytes of damage."""

    def __init__(self, part: Path) -> None:
        self.part, self.at, self.skipped = part, 0, 0

    def advance(self) -> Iterator[Block]:
        with regular_file(self.part).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self.at < size:
                block = self._block(file.seek(self.at), file.read(HEAD.size))
                if (
                    block is not None
                    and block.end <= size
                    and (self._goes_on(file, block.end, size) or is_whole(block))
                ):
                    self.at = block.end
                    yield block
                    continue
                found = self._next_mark(file, self.at + 1, size)
                if found is None and (block is not None or size - self.at < HEAD.size):
                    return  # perhaps it is being written
                self.skipped += (size if found is None else found) - self.at
                self.at = size if found is None else found

    def unfinished(self) -> int:
        """Bytes after the last whole block: damage, once nobody writes here any more."""
        try:
            return max(0, self.part.stat().st_size - self.at)
        except FileNotFoundError:
            return 0

    def _block(self, at: int, head: bytes) -> Block | None:
        if len(head) < HEAD.size:
            return None
        mark, step, attempt, count, body, table, crc, signature = HEAD.unpack(head)
        if mark != MARK or signature != zlib.crc32(head[: UNSIGNED.size]):
            return None
        return Block(self.part, at, step, attempt, count, body, table, crc)

    @staticmethod
    def _goes_on(file: Any, end: int, size: int) -> bool:
        """Whether the next block begins where this one ends; after a crash it may begin in the middle of this one."""
        file.seek(end)
        return end == size or MARK.startswith(file.read(len(MARK)))

    @staticmethod
    def _next_mark(file: Any, at: int, size: int) -> int | None:
        while at < size:
            file.seek(at)
            chunk = file.read(CHUNK + len(MARK))
            if (found := chunk.find(MARK)) >= 0:
                return at + found
            at += CHUNK
        return None
