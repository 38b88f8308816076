"""JSONL files that grow through a long run: they rotate, survive a full disk, and are read in order.

`rollouts.jsonl` is the newest part; older ones are `rollouts.1.jsonl` (the oldest), `rollouts.2.jsonl`, .. A failed
write never stops the run: its rows wait in memory, within a limit, and the next write retries.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mtrl.utils.files import regular_file

ROTATE_AT = 64 * 2**20  # bytes of a full part: editors still open it
KEPT_PARTS = 16  # about a GiB with the newest part, or 250 steps of 2048 responses of 512 tokens
WAITING_BYTES = 16 * 2**20  # size limit of the rows that wait for a successful write; beyond it the oldest are dropped
TAIL_BYTES = 64 * 2**10
MAX_LINE_BYTES = 16 * 2**20  # a longer line is no row of ours, and would take several times its size in memory
SKIP_BYTES = 2**20
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape it, but it cannot be written as UTF-8

Row = dict[str, Any]

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends rows to `path`. A file of `rotate_at` bytes becomes a numbered part; the newest `keep` parts stay."""

    def __init__(self, path: Path, rotate_at: int | None = None, keep: int = KEPT_PARTS) -> None:
        self.path, self.rotate_at, self.keep = path, rotate_at, keep
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._broken = self._has_dropped = False
        end_last_line(path)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        self._waiting.append("".join(as_line(row) for row in rows).encode("utf-8", "replace"))
        self._flush()

    def close(self) -> None:
        """Try a last time to write the waiting rows."""
        if self._waiting:
            self._flush()
        if self._waiting:
            rows = sum(blob.count(b"\n") for blob in self._waiting) + self._lost
            logger.error("%s: %d rows could not be written and are lost", self.path, rows)

    def _flush(self) -> None:
        try:
            blob = b"".join(self._waiting)
            self._rotate(len(blob))
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(parents=True)
                logger.warning("%s was removed and has been created again, without its files", self.path.parent)
            append_whole(self.path, blob)
        except OSError as error:
            if not self._broken:
                logger.warning("%s cannot be written (%s); the run continues and retries each step", self.path, error)
            self._broken = True
            while sum(map(len, self._waiting)) > WAITING_BYTES:
                self._lost += self._waiting.popleft().count(b"\n")
            return
        self._waiting.clear()
        if self._broken:
            lost = f"; {self._lost} rows are lost" if self._lost else ""
            logger.warning("%s can be written again%s", self.path, lost)
        self._broken, self._lost = False, 0

    def _rotate(self, new_bytes: int) -> None:
        old_bytes = self.path.stat().st_size if self.path.exists() else 0
        if self.rotate_at is None or not old_bytes or old_bytes + new_bytes <= self.rotate_at:
            return
        older = rotated_parts(self.path)
        number = part_number(older[-1]) + 1 if older else 1
        self.path.rename(self.path.with_suffix(f".{number}{self.path.suffix}"))
        for old in older[: max(0, len(older) + 1 - self.keep)]:
            if not self._has_dropped:
                message = "%s is deleted: only the newest %d parts of %s are kept"
                logger.warning(message, old.name, self.keep, self.path.name)
            self._has_dropped = True
            old.unlink(missing_ok=True)


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the bytes, or leave the file as it was: half a row would spoil the next one."""
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
def iter_rows(path: Path) -> Iterator[Row]:
    """Every complete row of a JSONL file and its rotated parts, the oldest first. Lines cut off by a crash are left
    out."""
    for part in (*rotated_parts(path), path):
        if part.exists():
            with regular_file(part).open("rb") as lines:
                yield from parse_rows(bounded_lines(lines))


def read_rows(path: Path) -> list[Row]:
    return list(iter_rows(path))


def last_row(path: Path) -> Row | None:
    """The last complete row, read from the end: the file may be large."""
    if not path.exists():
        return None
    with regular_file(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        window = TAIL_BYTES
        while True:
            file.seek(max(0, size - window))
            lines = file.read(min(window, size)).split(b"\n")
            complete = lines if window >= size else lines[1:]  # the first may be the end of a longer one
            for row in parse_rows(reversed(complete)):
                return row
            if window >= size:
                return None
            window *= 4


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one longer than MAX_LINE_BYTES is left out without being held in memory."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
        else:
            skip_line(file)


def skip_line(file: BinaryIO, max_bytes: int | None = None) -> bool:
    """Move to the end of the line, or of the file, or on by about `max_bytes`; return whether the line ended."""
    start = file.tell()
    while piece := file.readline(SKIP_BYTES):
        if piece.endswith(b"\n"):
            return True
        if max_bytes is not None and file.tell() - start > max_bytes:
            break
    return False


def parse_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    return (row for line in lines if (row := parse_row(line)) is not None)


def parse_row(line: bytes) -> Row | None:
    """A row of a JSONL file; None if the line is not a JSON object."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def parse_json(data: bytes) -> Any:
    """The value of a JSON text, with U+FFFD for lone surrogates; ValueError if it is no JSON, has a number with too
    many digits, or is nested too deeply."""
    try:
        value = json.loads(data.decode("utf-8-sig", errors="replace"))
        if b"\\ud" in data or b"\\uD" in data:
            text = json.dumps(value, ensure_ascii=False)
            if LONE_SURROGATE.search(text):
                value = json.loads(LONE_SURROGATE.sub("\ufffd", text))
        return value
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def rotated_parts(path: Path) -> list[Path]:
    """The older parts of a rotating file, the oldest first."""
    files = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return sorted((file for file in files if part_number(file)), key=part_number)


def part_number(part: Path) -> int:
    """The number of an older part: 7 for `rollouts.7.jsonl`, 0 for anything else."""
    number = part.stem.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


# ---------------------------------------------------------------------------------------------------------------- text
def as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(without_nan(dict(row)), ensure_ascii=False, default=str) + "\n"


def without_nan(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def end_last_line(path: Path) -> None:
    """End the last line of a file: the next row must not be appended to a line that a crash cut off."""
    if not path.exists() or not regular_file(path).stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
