"""The files of a run's record, `record/part-00001.bin` and so on: one block per step, each readable on its own.

    head    64 bytes: a mark, step, attempt, number of responses, sizes and checksums
    body    images (each once per part) and responses, each compressed separately
    table   compressed JSON: prompts, rewards, and the location of each image and response in the part

A reader walks from head to head and reads the rest on demand; it continues where it stopped while the file grows, and
after damage it searches for the next mark. Parts are never changed: the oldest are deleted, with their images, when the
total size would pass the limit. Nothing here imports torch, to keep the viewer light.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mtrl.tracking.jsonl import append_whole, parse_json
from mtrl.utils.files import regular_file
from mtrl.utils.metric_history import is_step

RECORD_DIR = "record"  # in a run's directory
MARK = b"\x89MTRLREC"
HEAD = struct.Struct("<8sQIIQIII20x")  # mark, step, attempt, responses, body bytes, table bytes, table CRC, head CRC
UNSIGNED = struct.Struct("<8sQIIQII")  # the head without its own checksum
PARTS = 16  # a part takes this fraction of the limit, so that rotation deletes no more than that at once
MAX_PIECE_BYTES = 64 * 2**20  # a table or a response; anything larger is damaged or malicious
CHUNK_BYTES = 2**20
MAX_RESPONSES = 2**20  # of a step; a larger number is damage

Table = dict[str, Any]


class DamagedRecord(ValueError):
    """A part of a file that differs from what was written."""


def part_number(part: Path) -> int:
    return int(part.stem.removeprefix("part-"))


def block_parts(directory: Path) -> list[Path]:
    """The existing parts, the oldest first."""
    files = [path for path in directory.glob("part-*.bin") if path.stem.removeprefix("part-").isdecimal()]
    return sorted(files, key=part_number)


def decompress(data: bytes) -> bytes:
    """Decompress up to MAX_PIECE_BYTES: a few bytes of a malicious file may expand to gigabytes."""
    reader = zlib.decompressobj()
    try:
        whole = reader.decompress(data, MAX_PIECE_BYTES)
    except zlib.error as error:
        raise DamagedRecord(str(error)) from error
    if reader.unconsumed_tail or not reader.eof:
        raise DamagedRecord("compressed data are cut off or too large")
    return whole


# ------------------------------------------------------------------------------------------------------------- writing
class BlockWriter:
    """Appends blocks to a new part: an attempt never changes the parts of an earlier one."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit = directory, limit_bytes
        self._number: int | None = None  # number of the part being written
        self._images: dict[str, tuple[int, int, int]] = {}  # (offset, size, CRC) of each image in this part

    def append(
        self,
        step: int,
        attempt: int,
        table: Table,
        responses: Sequence[bytes],
        images: Mapping[str, Callable[[], bytes]],
    ) -> None:
        """Write a whole step, or nothing. Only images that this part does not contain yet are encoded."""
        path = self._choose_part()
        start = path.stat().st_size if path.exists() else 0
        body = bytearray()

        def add(data: bytes) -> tuple[int, int, int]:
            body.extend(data)
            return start + HEAD.size + len(body) - len(data), len(data), zlib.crc32(data)

        def relative(location: tuple[int, int, int]) -> list[int]:
            """With the offset from the start of the block: damage before the block may remove bytes."""
            return [location[0] - start, *location[1:]]

        located = {key: self._images.get(key) or add(encode()) for key, encode in images.items()}
        where = [relative(add(response)) for response in responses]
        whole = table | {"images": {key: relative(location) for key, location in located.items()}, "where": where}
        text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
        lines = zlib.compress(text.encode("utf-8", "replace"), 4)
        unsigned = UNSIGNED.pack(MARK, step, attempt, len(responses), len(body), len(lines), zlib.crc32(lines))
        head = unsigned + struct.pack("<I20x", zlib.crc32(unsigned))
        self._make_room(path, len(head) + len(body) + len(lines))
        self.directory.mkdir(parents=True, exist_ok=True)
        append_whole(path, b"".join((head, body, lines)))
        self._images |= located

    def _choose_part(self) -> Path:
        if self._number is None:
            self._number = 1 + max(map(part_number, block_parts(self.directory)), default=0)
        path = self.directory / f"part-{self._number:05d}.bin"
        if path.exists() and path.stat().st_size >= self.limit // PARTS:
            self._number += 1
            path = self.directory / f"part-{self._number:05d}.bin"
        if not path.exists():
            self._images = {}  # a new part, or somebody deleted it with its images
        return path

    def _make_room(self, path: Path, new_bytes: int) -> None:
        older = [part for part in block_parts(self.directory) if part != path]
        total = new_bytes + sum(part.stat().st_size for part in (*older, path) if part.exists())
        while total > self.limit and older:
            oldest = older.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        if total > self.limit:
            raise OSError(f"a step takes {new_bytes / 2**20:.1f} MiB, more than training.record_limit_gib allows")


# ------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class Block:
    """The block of a step in a part."""

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
            table = parse_json(decompress(data))
        except ValueError as error:
            raise DamagedRecord(f"step {self.step}: its table cannot be read") from error
        if not isinstance(table, dict):
            raise DamagedRecord(f"step {self.step}: its table is not a JSON object")
        return table

    def is_whole(self) -> bool:
        try:
            return bool(self.table())
        except DamagedRecord:
            return False

    def read(self, location: Sequence[int]) -> bytes:
        """The image or response at a location from the table."""
        try:
            offset, size, crc = map(int, location)
        except (TypeError, ValueError, OverflowError) as error:
            raise DamagedRecord("a location in a table is damaged") from error
        return read_at(self.part, self.start + offset, size, crc)


def read_at(path: Path, offset: int, size: int, crc: int) -> bytes:
    if not 0 <= size <= MAX_PIECE_BYTES or not 0 <= offset < 2**63:
        raise DamagedRecord(f"{path.name}: invalid size {size} or offset {offset}")
    with regular_file(path).open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size or zlib.crc32(data) != crc:
        raise DamagedRecord(f"{path.name}: data at {offset} are damaged or cut off")
    return data


class PartReader:
    """Finds the blocks of one part. `read_new` continues where it stopped; `skipped` counts damaged bytes."""

    def __init__(self, part: Path) -> None:
        self.part, self.offset, self.skipped = part, 0, 0

    def read_new(self) -> Iterator[Block]:
        with regular_file(self.part).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self.offset < size:
                file.seek(self.offset)
                block = self._parse_head(file.read(HEAD.size))
                if block is not None and block.end <= size and (follows(file, block.end, size) or block.is_whole()):
                    self.offset = block.end
                    yield block
                    continue
                mark = find_mark(file, self.offset + 1, size)
                if mark is None and (block is not None or size - self.offset < HEAD.size):
                    return  # it may still be being written
                end = size if mark is None else mark
                self.skipped += end - self.offset
                self.offset = end

    def unfinished(self) -> int:
        """Bytes after the last whole block: damaged if the part is no longer written to."""
        try:
            return max(0, self.part.stat().st_size - self.offset)
        except FileNotFoundError:
            return 0

    def _parse_head(self, head: bytes) -> Block | None:
        if len(head) < HEAD.size:
            return None
        mark, *fields, signature = HEAD.unpack(head)
        if mark != MARK or signature != zlib.crc32(head[: UNSIGNED.size]):
            return None
        block = Block(self.part, self.offset, *fields)
        return block if is_step(block.step) and block.count <= MAX_RESPONSES else None


def follows(file: BinaryIO, end: int, size: int) -> bool:
    """Whether the next block starts where this one ends; after a crash it may start in the middle of this one."""
    file.seek(end)
    return end == size or MARK.startswith(file.read(len(MARK)))


def find_mark(file: BinaryIO, offset: int, size: int) -> int | None:
    for start in range(offset, size, CHUNK_BYTES):
        file.seek(start)
        index = file.read(CHUNK_BYTES + len(MARK)).find(MARK)
        if index >= 0:
            return start + index
    return None
