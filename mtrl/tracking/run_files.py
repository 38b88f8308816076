"""The files of a run, always written and append-only:

    metrics.jsonl      a row a step and a row a validation
    rollouts.jsonl     a row a response; rotates (see jsonl.py)
    validations.jsonl  a row a validation sample that is kept; rotates

Rows carry `step` and `attempt`; where a step was done twice, readers take the last attempt. `time` is the wall clock's
and may go back; nothing depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from mtrl.protocols import Tracker
from mtrl.tracking.jsonl import ROTATE_AT, JsonlWriter, Row, last_row, read_rows, read_rows_of
from mtrl.tracking.table import by_name
from mtrl.types import Experience, ValidationSample

logger = logging.getLogger(__name__)

__all__ = ["RunFiles", "first_steps", "read_history", "read_rows", "read_validations"]


class RunFiles(Tracker):
    """A tracker that writes these files. With `every_step` off, only validated steps have their rollouts written."""

    def __init__(self, directory: Path, every_step: bool = True, rotate_at: int = ROTATE_AT) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        names = ("metrics", "rollouts", "validations")
        paths = [directory / f"{name}.jsonl" for name in names]
        before = [(last_row(path) or {}).get("attempt", 0) for path in paths]
        self.attempt = 1 + max(number if type(number) is int else 0 for number in before)
        self.every_step = every_step
        self._metrics = JsonlWriter(paths[0])
        self._rollouts, self._samples = (JsonlWriter(path, rotate_at) for path in paths[1:])
        self._of_last_step: list[dict[str, Any]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.append([{**self._head(step), **values}])

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[ValidationSample] = (),
    ) -> None:
        self._metrics.append([{**self._head(step), **values, **by_name(by)}])
        self._samples.append([{**self._head(step), **asdict(sample)} for sample in samples])
        self._rollouts.append(self._of_last_step)
        self._of_last_step = []

    def rollouts(self, step: int, experience: Experience) -> None:
        rollouts, rewards = experience.rollouts, experience.rewards
        lengths = rollouts.mask.sum(1).tolist()
        tasks = [rollouts.prompts[g].task for g in rollouts.group.tolist()]
        rows = [
            {
                **self._head(step),
                "id": task.id,
                "response": rollouts.text[i],
                "answer": task.answer,
                "reward": rewards.total[i].item(),
                "rewards": {name: part[i].item() for name, part in rewards.parts.items()},
                "failed": bool(rewards.failed[i]),
                "tokens": lengths[i],
                "finish": rollouts.finish_reason[i],
                "version": int(
                    rollouts.version[i]
                ),  # of the weights that sampled it: a replayed row has an earlier one
            }
            for i, task in enumerate(tasks)
        ]
        if self.every_step:
            self._rollouts.append(rows)
        else:
            self._of_last_step = rows

    def close(self) -> None:
        for file in (self._metrics, self._rollouts, self._samples):
            file.close()

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}


def rows_by_step(path: Path) -> Iterator[Row]:
    """The rows that have a step, with their numbers alone. Others are none of ours: they are counted and left out."""
    strange = 0
    for row in read_rows_of(path):
        if type(row.get("step")) is int:
            yield {name: x for name, x in row.items() if isinstance(x, (int, float))}
        else:
            strange += 1
    if strange:
        logger.warning("%s: %d rows without a step are left out", path, strange)


def read_validations(directory: Path) -> dict[int, dict[str, float]]:
    """What earlier attempts of a run validated, by step; the last counts where a step was done twice."""
    found = {}
    for row in rows_by_step(directory / "metrics.jsonl"):
        if "val/reward_score" in row:
            found[row["step"]] = {name: x for name, x in row.items() if name.startswith("val/")}
    return found


def first_steps(directory: Path, count: int = 5) -> list[dict[str, float]]:
    """The metrics of a run's first steps, where earlier attempts have left any."""
    steps = (row for row in rows_by_step(directory / "metrics.jsonl") if "perf/seconds_step" in row)
    return list(islice(steps, count))


def read_history(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in the order of the steps; of a step or validation that was done twice, the last."""
    whole = (row for row in read_rows_of(directory / "metrics.jsonl") if type(row.get("step")) is int)
    rows = {(row["step"], "perf/seconds_step" in row): row for row in whole}
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0], not key[1]))]
