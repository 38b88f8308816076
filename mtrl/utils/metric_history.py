"""The curves of a run by metric, from the rows of its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

History = Mapping[str, Sequence[tuple[float, float]]]  # (step, value) of each metric by name

HEAD = ("step", "attempt", "time")  # columns that describe the row
LARGEST = 1e100  # beyond it an axis cannot be divided; such a number means infinity


class MetricCurves:
    """The values of each metric by step. A resumed attempt undoes the steps of earlier ones from its first step on."""

    def __init__(self) -> None:
        self.metrics: dict[str, dict[int, float]] = {}
        self._attempt: Any = None

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False if it has no step."""
        step = row.get("step")
        if not is_step(step):
            return False
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            begin = step + any(name.startswith("val/") for name in row)  # a validation comes after its step
            for name, curve in self.metrics.items():
                self.metrics[name] = {s: y for s, y in curve.items() if s < begin}
        for name, value in row.items():
            if name not in HEAD and is_number(value):
                self.metrics.setdefault(name, {})[step] = float(value)
        return True


def history(rows: Iterable[Mapping[str, Any]]) -> History:
    """The points of each metric."""
    curves = MetricCurves()
    for row in rows:
        curves.add(row)
    return {name: sorted(curve.items()) for name, curve in curves.metrics.items() if curve}


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
