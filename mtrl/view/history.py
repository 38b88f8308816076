"""The numbers of a run by step, read on while metrics.jsonl grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.utils.files import regular_file
from mtrl.utils.metric_history import HEAD, is_number, is_step


class Tail:
    """The whole lines of a file that grows. `new` gives those that were not read yet, with where each begins; a file
    that was put in its place is read from the start."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.again = path, 0, False
        self._node: int | None = None

    def new(self, most: int | None = None) -> Iterator[tuple[int, bytes]]:
        """At most about `most` bytes at a time: a large file must not keep a page waiting."""
        if not self.path.is_file():
            return
        with regular_file(self.path).open("rb") as file:
            status = self.path.stat()
            self.again = status.st_ino != self._node or status.st_size < self.at
            if self.again:
                self.at, self._node = 0, status.st_ino
            begin = file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n") or (most is not None and self.at - begin > most):
                    return  # it is being written
                at, self.at = self.at, self.at + len(line)
                yield at, line


class MetricTail:
    """Each metric's values by step. What an attempt did after the step where the next one began was undone."""

    def __init__(self, path: Path) -> None:
        self.metrics: dict[str, dict[int, float]] = {}
        self.damaged = 0
        self._tail = Tail(path)
        self._attempt: Any = None

    def refresh(self) -> None:
        lines = self._tail.new()
        for _, line in lines:
            if self._tail.again:
                self.metrics, self.damaged, self._attempt, self._tail.again = {}, 0, None, False
            row = parsed(line)
            if row is not None and is_step(row.get("step")):
                self._add(row)
            elif line.strip():
                self.damaged += 1

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            begin = step + any(name.startswith("val/") for name in row)  # a validation comes after its step
            for points in self.metrics.values():
                for late in [s for s in points if s >= begin]:
                    del points[late]
        for name, value in row.items():
            if name not in HEAD and is_number(value):
                self.metrics.setdefault(name, {})[step] = float(value)

    def series(self, names: Iterable[str], after: int = -1) -> dict[str, list[Sequence[float]]]:
        """[steps, values] of each metric that is there, of the steps after one."""
        found: dict[str, list[Sequence[float]]] = {}
        for name in names:
            points = sorted((s, y) for s, y in self.metrics.get(name, {}).items() if s > after)
            found[name] = [[s for s, _ in points], [y for _, y in points]]
        return found

    @property
    def last_step(self) -> int | None:
        return max((max(points) for points in self.metrics.values() if points), default=None)


def parsed(line: bytes) -> dict[str, Any] | None:
    """A row of a JSONL file; None where the line is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
