"""The metrics of a run by step, read while metrics.jsonl grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mtrl.tracking.jsonl import parse_row
from mtrl.utils.files import regular_file
from mtrl.utils.metric_history import MetricCurves


class LineTail:
    """The complete lines of a growing file. A file that replaces it is read from the start, and `restarted` is set."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.restarted = path, 0, False
        self._inode: int | None = None

    def read_new(self, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The offsets and lines not read yet, about `max_bytes` at most: a large file must not delay a page."""
        if not self.path.is_file():
            return
        with regular_file(self.path).open("rb") as file:
            status = self.path.stat()
            self.restarted = status.st_ino != self._inode or status.st_size < self.offset
            if self.restarted:
                self.offset, self._inode = 0, status.st_ino
            start = file.seek(self.offset)
            for line in file:
                is_partial = not line.endswith(b"\n")  # it is still being written
                if is_partial or (max_bytes is not None and self.offset - start > max_bytes):
                    return
                offset, self.offset = self.offset, self.offset + len(line)
                yield offset, line


class MetricTail(MetricCurves):
    """The metrics of a growing metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.damaged = 0
        self._tail = LineTail(path)

    def refresh(self) -> None:
        for _, line in self._tail.read_new():
            if self._tail.restarted:
                self.metrics, self.damaged, self._attempt, self._tail.restarted = {}, 0, None, False
            row = parse_row(line)
            if (row is None or not self.add(row)) and line.strip():
                self.damaged += 1

    def series(self, names: Iterable[str], after: int = -1) -> dict[str, list[Sequence[float]]]:
        """[steps, values] of each metric, for the steps after `after`."""
        curves: dict[str, list[Sequence[float]]] = {}
        for name in names:
            points = sorted((s, y) for s, y in self.metrics.get(name, {}).items() if s > after)
            curves[name] = [[s for s, _ in points], [y for _, y in points]]
        return curves

    @property
    def last_step(self) -> int | None:
        return max((max(points) for points in self.metrics.values() if points), default=None)
