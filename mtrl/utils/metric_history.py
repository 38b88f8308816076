"""The curves of a run by metric, from the rows of its metrics.jsonl."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, overload

History = Mapping[str, Sequence[tuple[float, float]]]  # (step, value) of each metric by name

HEAD = frozenset(("step", "attempt", "time"))  # columns that describe the row
LARGEST = 1e100  # beyond it an axis cannot be divided; such a number means infinity


class MetricCurve(Sequence[tuple[int, float]]):
    """The (step, value) pairs of a metric in the order of the steps. A pair takes 16 bytes, since a long run has
    millions of them."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, float]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, float] | list[tuple[int, float]]:
        if isinstance(index, slice):
            return list(zip(self.steps[index], self.values[index], strict=True))
        return self.steps[index], self.values[index]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def set(self, step: int, value: float) -> None:
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        index = bisect_left(self.steps, step)
        if self.steps[index] != step:
            self.steps.insert(index, step)
            self.values.insert(index, value)
        self.values[index] = value

    def cut(self, begin: int) -> None:
        """Delete the steps from `begin` on."""
        index = bisect_left(self.steps, begin)
        del self.steps[index:], self.values[index:]

    def thin_out(self, width: int) -> tuple[list[int], list[float]]:
        """Steps and values: the mean of every `width` steps at the last of them, and the last value as it is. Metrics
        of the same steps stay metrics of the same steps."""
        if width == 1 or not self:
            return self.steps.tolist(), self.values.tolist()
        steps, means, start, last = [], [], 0, len(self) - 1
        while start < last:
            end = bisect_left(self.steps, (self.steps[start] // width + 1) * width, start, last)
            steps.append(self.steps[end - 1])
            means.append(sum(self.values[start:end]) / (end - start))
            start = end
        return [*steps, self.steps[last]], [*means, self.values[last]]


class MetricCurves:
    """The values of each metric by step. A resumed attempt undoes the steps of earlier ones from its first step on."""

    def __init__(self) -> None:
        self.metrics: dict[str, MetricCurve] = {}
        self._attempt: Any = None

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False if it has no step."""
        step = row.get("step")
        if not is_step(step):
            return False
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            begin = step + any(name.startswith("val/") for name in row)  # a validation comes after its step
            for curve in self.metrics.values():
                curve.cut(begin)
        for name, value in row.items():
            if name not in HEAD and is_number(value):
                self.set(name, step, float(value))
        return True

    def set(self, name: str, step: int, value: float) -> None:
        curve = self.metrics.get(name)
        if curve is None:
            curve = self.metrics[name] = MetricCurve()
        curve.set(step, value)

    def to_history(self) -> History:
        return {name: curve for name, curve in self.metrics.items() if curve}


def history(rows: Iterable[Mapping[str, Any]]) -> History:
    """The points of each metric."""
    curves = MetricCurves()
    for row in rows:
        curves.add(row)
    return curves.to_history()


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
