"""JSONL files that grow through a long run: they rotate, outlive a full disk, and are read in order.

`rollouts.jsonl` is the newest part; older ones are `rollouts.1.jsonl` (the oldest), `rollouts.2.jsonl`, .. A write that
fails never stops the run: its rows wait in memory, within a bound, and the next write tries again.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrl.utils.files import regular_file

ROTATE_AT = 64 * 2**20  # bytes of a full part, which an editor still opens
KEPT_PARTS = 16  # parts kept: about a GiB with the newest one, some 250 steps of 2048 responses of 512 tokens
WAITING_BYTES = 16 * 2**20  # size of the rows that wait for a write to succeed; beyond it the oldest are given up
TAIL_BYTES = 64 * 2**10

Row = dict[str, Any]

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends rows to `path`. With `rotate_at` a full file becomes a numbered part; the newest `keep` parts stay."""

    def __init__(self, path: Path, rotate_at: int | None = None, keep: int = KEPT_PARTS) -> None:
        self.path, self.rotate_at, self.keep = path, rotate_at, keep
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._broken = self._has_dropped = False
        end_last_line(path)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        self._waiting.append("".join(as_line(row) for row in rows).encode())
        self._flush()

    def close(self) -> None:
        """Tries a last time to write the rows that wait."""
        if self._waiting:
            self._flush()
        if self._waiting:
            logger.error("%s: %d rows could not be written and are lost", self.path, self._rows_waiting())

    def _flush(self) -> None:
        try:
            blob = b"".join(self._waiting)
            self._make_room(len(blob))
            self._write(blob)
        except OSError as error:
            self._wait(error)
            return
        self._waiting.clear()
        if self._broken:
            lost = f"; {self._lost} rows are lost" if self._lost else ""
            logger.warning("%s can be written again%s", self.path, lost)
        self._broken, self._lost = False, 0

    def _write(self, blob: bytes) -> None:
        """Writes all of the bytes, or leaves the file as it was: half a line would spoil the next one."""
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True)
            logger.warning("%s was gone and is made again, without what was in it", self.path.parent)
        with self.path.open("ab", buffering=0) as file:
            before, written = file.tell(), 0
            try:
                while written < len(blob):
                    written += file.write(blob[written:])
            except OSError:
                with suppress(OSError):
                    file.truncate(before)
                raise

    def _wait(self, error: OSError) -> None:
        if not self._broken:
            logger.warning("%s cannot be written (%s); the run goes on and tries again each step", self.path, error)
        self._broken = True
        while sum(map(len, self._waiting)) > WAITING_BYTES:
            self._lost += self._waiting.popleft().count(b"\n")

    def _rows_waiting(self) -> int:
        return sum(blob.count(b"\n") for blob in self._waiting) + self._lost

    def _make_room(self, size: int) -> None:
        if self.rotate_at is None or not self.path.exists():
            return
        held = self.path.stat().st_size
        if held == 0 or held + size <= self.rotate_at:
            return
        older = parts(self.path)
        number = part_number(older[-1]) + 1 if older else 1
        self.path.rename(self.path.with_suffix(f".{number}{self.path.suffix}"))
        for old in older[: max(0, len(older) + 1 - self.keep)]:
            if not self._has_dropped:
                logger.warning("%s is dropped: the newest %d parts of %s stay", old.name, self.keep, self.path.name)
            self._has_dropped = True
            old.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- reading
def read_rows_of(path: Path) -> Iterator[Row]:
    """Every whole row of a JSONL file and its older parts, the oldest first, one at a time. Lines that a crash cut off
    are left out."""
    for part in (*parts(path), path):
        if part.exists():
            with regular_file(part).open(encoding="utf-8", errors="replace") as lines:
                yield from whole_rows(lines)


def read_rows(path: Path) -> list[Row]:
    return list(read_rows_of(path))


def last_row(path: Path) -> Row | None:
    """The last whole row, read from the end: the file may be large."""
    if not path.exists():
        return None
    with regular_file(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        window = TAIL_BYTES
        while True:
            file.seek(max(0, size - window))
            lines = file.read(min(window, size)).decode("utf-8", errors="replace").split("\n")
            inner = lines if window >= size else lines[1:]  # the first may be the end of a longer one
            for row in whole_rows(reversed(inner)):
                return row
            if window >= size:
                return None
            window *= 4


def whole_rows(lines: Iterable[str]) -> Iterator[Row]:
    for line in lines:
        with suppress(ValueError, RecursionError):  # no JSON, a number without end, brackets without end
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def parts(path: Path) -> list[Path]:
    """The older parts of a file that rotates, the oldest first."""
    found = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return sorted((part for part in found if part_number(part)), key=part_number)


def part_number(part: Path) -> int:
    """The number of an older part: 7 for `rollouts.7.jsonl`, 0 for anything else."""
    number = part.stem.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


# ---------------------------------------------------------------------------------------------------------------- text
def as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(without_nan(dict(row)), ensure_ascii=False, default=str) + "\n"


def without_nan(value: Any) -> Any:
    """The value with None for NaN, which JSON does not have: what does not apply is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def end_last_line(path: Path) -> None:
    """Ends the last line of a file: one that a crash cut off must not swallow the next one."""
    if not path.exists() or not regular_file(path).stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
