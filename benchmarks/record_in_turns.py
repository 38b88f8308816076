"""Cost of the rollout record per step on a GPU: steps of `benchmarks.step`, alternately two recorded and two not.

    python -m benchmarks.record_in_turns --size 3b --device cuda .. --steps 40 --out FILE   # options of benchmarks.step

Two processes differ by more than the record costs, and a device slows down as it warms up. So one process runs all
steps, and the cost is fitted together with a linear drift: wall = a + b * step + c * recorded, with c's standard error.
A thread records a step after its end, so the next step pays the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.environment import finish
from benchmarks.step import parse, run
from mtrl.bench.measure import PHASES
from mtrl.tracking.record import RolloutRecord
from mtrl.types import Experience

TURN = 2
WARM_UP = 3  # steps that compile, capture and allocate


def is_recorded(step: int) -> bool:
    return (step // TURN) % 2 == 1


def pays_for_record(step: int) -> bool:
    """Whether the record of the previous step is written during this one."""
    return is_recorded(step - 1)


def cost(steps: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds that writing a record adds to a step, and their standard error."""
    columns = np.array([[1.0, step, pays_for_record(step)] for step in steps])
    values = np.asarray(seconds, dtype=float)
    coefficients = np.linalg.lstsq(columns, values, rcond=None)[0]
    residual = values - columns @ coefficients
    variance = residual @ residual / (len(values) - columns.shape[1])
    return float(coefficients[2]), float(np.sqrt(variance * np.linalg.inv(columns.T @ columns)[2, 2]))


def main() -> None:
    a = parse()
    real = RolloutRecord.rollouts

    def in_turns(record: RolloutRecord, step: int, experience: Experience) -> None:
        if is_recorded(step):
            real(record, step, experience)

    with mock.patch.object(RolloutRecord, "rollouts", in_turns):
        result = run(a)
    rows = [row for row in result["steps"] if row["step"] > WARM_UP]
    steps, wall = [row["step"] for row in rows], [row["wall"] for row in rows]
    seconds: dict[str, Any] = {"step": float(np.mean(wall))}
    for name in ("wall", *PHASES):
        seconds[name] = dict(zip(("more", "error"), cost(steps, [row[name] for row in rows]), strict=True))
    seconds["percent"] = {name: 100 * value / seconds["step"] for name, value in seconds["wall"].items()}
    finish({"what": "record in turns", "args": result["args"], "seconds": seconds, "wall": wall}, a.out)


if __name__ == "__main__":
    main()
