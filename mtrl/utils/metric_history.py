"""The numbers of a run by metric, from the rows of its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

History = Mapping[str, Sequence[tuple[float, float]]]  # (step, value) of each metric by name

HEAD = ("step", "attempt", "time")  # columns that describe the row
LARGEST = 1e100  # an axis could not be divided beyond it; such a number says no more than infinity


def history(rows: Iterable[Mapping[str, Any]]) -> History:
    """The numbers of a run by name. What an attempt did after the step where the next one began was undone."""
    found: dict[str, dict[int, float]] = {}
    attempt: Any = None
    for row in rows:
        step = row.get("step")
        if not is_step(step):
            continue
        if row.get("attempt") != attempt:
            attempt = row.get("attempt")
            begin = step + any(name.startswith("val/") for name in row)  # a validation comes after its step
            found = {name: {s: y for s, y in points.items() if s < begin} for name, points in found.items()}
        for name, value in row.items():
            if name not in HEAD and is_number(value):
                found.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in found.items() if points}


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
