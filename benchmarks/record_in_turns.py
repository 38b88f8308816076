"""What the record costs a step on a GPU: the step of `benchmarks.step`, two steps recorded and two not, in turn.

    python -m benchmarks.record_in_turns --size 3b --device cuda .. --steps 40 --out FILE    # words of benchmarks.step

Two processes differ by more than the record costs, and a device slows down as it warms. So it is one process, and the
cost is fitted beside a line of time: wall = a + b * step + c * recorded, with c's standard error. A step is recorded
when it has ended, by a thread, so that the next one bears the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.environment import finish
from benchmarks.step import PHASES, parse, run
from mtrl.tracking.record import RolloutRecord
from mtrl.types import Experience

TURN = 2
WARMING = 3  # steps that compile, capture and allocate


def is_recorded(step: int) -> bool:
    return (step // TURN) % 2 == 1


def bears(step: int) -> bool:
    """Whether the record of the step before is written beside it."""
    return is_recorded(step - 1)


def cost(steps: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """What bearing a record adds, and its standard error."""
    columns = np.array([[1.0, step, bears(step)] for step in steps])
    values = np.asarray(seconds, dtype=float)
    found = np.linalg.lstsq(columns, values, rcond=None)[0]
    rest = values - columns @ found
    variance = rest @ rest / (len(values) - columns.shape[1])
    return float(found[2]), float(np.sqrt(variance * np.linalg.inv(columns.T @ columns)[2, 2]))


def main() -> None:
    a = parse()
    real = RolloutRecord.rollouts

    def in_turns(record: RolloutRecord, step: int, experience: Experience) -> None:
        if is_recorded(step):
            real(record, step, experience)

    with mock.patch.object(RolloutRecord, "rollouts", in_turns):
        result = run(a)
    rows = [row for row in result["steps"] if row["step"] > WARMING]
    steps, wall = [row["step"] for row in rows], [row["wall"] for row in rows]
    told: dict[str, Any] = {"step": float(np.mean(wall))}
    for name in ("wall", *PHASES):
        told[name] = dict(zip(("more", "error"), cost(steps, [row[name] for row in rows]), strict=True))
    told["percent"] = {name: 100 * value / told["step"] for name, value in told["wall"].items()}
    finish({"what": "record in turns", "args": result["args"], "seconds": told, "wall": wall}, a.out)


if __name__ == "__main__":
    main()
