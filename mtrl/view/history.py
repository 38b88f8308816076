"""The metrics of a run by step, read while metrics.jsonl grows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mtrl.tracking.jsonl import MAX_LINE_BYTES, parse_row, skip_line
from mtrl.utils.files import is_own_file
from mtrl.utils.metric_history import MetricCurve, MetricCurves

MAX_POINTS = 1000  # of a curve on the page, whose charts are narrower


class LineTail:
    """The complete lines of a growing file, if it is a file of the directory `root` and not a link that leads out of
    it. A file that replaces it is read from the start, and `restarted` is set. Lines above MAX_LINE_BYTES are passed
    over once and counted in `too_long`."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root, self.offset, self.restarted, self.too_long = path, root, 0, False, 0
        self._inode: int | None = None
        self._is_in_long_line = False
        self._partial_size = -1  # size of the file when its last line was seen to be incomplete

    def read_new(self, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The offsets and lines not read yet, about `max_bytes` at most: a large file must not delay a page."""
        if not is_own_file(self.path, self.root):
            return
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.restarted = status.st_ino != self._inode or status.st_size < self.offset
            if self.restarted:
                self.offset, self._inode, self.too_long, self._is_in_long_line = 0, status.st_ino, 0, False
            elif status.st_size == self._partial_size:
                return
            self._partial_size = -1
            start = file.seek(self.offset)
            while max_bytes is None or self.offset - start <= max_bytes:
                if self._is_in_long_line:
                    self._is_in_long_line = not skip_line(file, max_bytes)
                    self.offset = file.tell()
                    if self._is_in_long_line:
                        return
                line = file.readline(MAX_LINE_BYTES)
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:  # it is still being written
                    self._partial_size = status.st_size
                    return
                offset, self.offset = self.offset, self.offset + len(line)
                if line.endswith(b"\n"):
                    yield offset, line
                else:
                    self.too_long += 1
                    self._is_in_long_line = True


class MetricTail(MetricCurves):
    """The metrics of a growing metrics.jsonl in the directory `root`, by default its own."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        super().__init__()
        self.damaged = 0
        self._tail = LineTail(path, root or path.parent)

    @property
    def too_long(self) -> int:
        return self._tail.too_long

    def refresh(self) -> None:
        for _, line in self._tail.read_new():
            if self._tail.restarted:
                self.metrics, self.damaged, self._attempt, self._tail.restarted = {}, 0, None, False
            row = parse_row(line)
            if (row is None or not self.add(row)) and line.strip():
                self.damaged += 1

    def series(self, names: Iterable[str]) -> dict[str, list[Sequence[float]]]:
        """[steps, values] of each metric, MAX_POINTS at most: the page asks for all of them after each step."""
        last = self.last_step or 0
        width = 1 if last < MAX_POINTS else last // (MAX_POINTS - 1) + 1
        return {name: [*self.metrics.get(name, MetricCurve()).thin_out(width)] for name in names}

    @property
    def last_step(self) -> int | None:
        return max((curve.steps[-1] for curve in self.metrics.values() if curve), default=None)
