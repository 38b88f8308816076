"""The files that every run appends to:

    metrics.jsonl      one row per step and one per validation
    rollouts.jsonl     one row per response; rotates (see jsonl.py)
    validations.jsonl  one row per stored validation sample; rotates

Rows have `step` and `attempt`; if a step was done twice, readers take the last attempt. `time` is the wall clock, which
may go back; nothing depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any

from mtrl.protocols import Tracker
from mtrl.report.conversation import DecodeText, conversation
from mtrl.tracking.jsonl import ROTATE_AT, JsonlWriter, Row, iter_rows, last_row
from mtrl.tracking.table import ColumnRates, Values, flatten_rates
from mtrl.types import Experience, ValidationSample

logger = logging.getLogger(__name__)


class RunFiles(Tracker):
    """A tracker that writes these files. With `every_step` off, only the rollouts of validated steps are written.
    `decode`: the text of a turn; by default its token ids."""

    def __init__(
        self, directory: Path, every_step: bool = True, rotate_at: int = ROTATE_AT, decode: DecodeText = str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        names = ("metrics", "rollouts", "validations")
        paths = [directory / f"{name}.jsonl" for name in names]
        attempts = [(last_row(path) or {}).get("attempt") for path in paths]
        self.attempt = 1 + max(number if type(number) is int else 0 for number in attempts)
        self.every_step, self.decode = every_step, decode
        self._metrics = JsonlWriter(paths[0])
        self._rollouts, self._samples = (JsonlWriter(path, rotate_at) for path in paths[1:])
        self._last_rollouts: list[dict[str, Any]] = []  # the last step's, until it is validated

    def metrics(self, step: int, values: Values) -> None:
        self._metrics.append([{**self._head(step), **values}])

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample] = ()) -> None:
        self._metrics.append([{**self._head(step), **values, **flatten_rates(by)}])
        self._samples.append([{**self._head(step), **asdict(sample)} for sample in samples])
        self._rollouts.append(self._last_rollouts)
        self._last_rollouts = []

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
                "version": int(rollouts.version[i]),  # the sampling weights' version; replayed rows have an earlier one
            }
            | ({} if rollouts.noised is None else {"noised": bool(rollouts.noised[i])})
            | ({"response_turns": turns} if (turns := conversation(rollouts, i, self.decode)) else {})
            for i, task in enumerate(tasks)
        ]
        if self.every_step:
            self._rollouts.append(rows)
        else:
            self._last_rollouts = rows

    def close(self) -> None:
        for file in (self._metrics, self._rollouts, self._samples):
            file.close()

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}


def rows_by_step(path: Path) -> Iterator[Row]:
    """The rows with a step, reduced to their numbers. Other rows are skipped and counted in a warning."""
    skipped = 0
    for row in iter_rows(path):
        if type(row.get("step")) is int:
            yield {name: x for name, x in row.items() if isinstance(x, (int, float))}
        else:
            skipped += 1
    if skipped:
        logger.warning("%s: %d rows without a step are left out", path, skipped)


def read_validations(directory: Path) -> dict[int, dict[str, float]]:
    """The validations of earlier attempts by step; the last one if a step was done twice."""
    rows = (row for row in rows_by_step(directory / "metrics.jsonl") if "val/reward_score" in row)
    return {row["step"]: {name: x for name, x in row.items() if name.startswith("val/")} for row in rows}


def first_steps(directory: Path, count: int = 5) -> list[dict[str, float]]:
    """The metrics of a run's first steps in earlier attempts, if any."""
    steps = (row for row in rows_by_step(directory / "metrics.jsonl") if "perf/seconds_step" in row)
    return list(islice(steps, count))


def read_history(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in the order of the steps; the last one if a step or validation was done twice."""
    numbered = (row for row in iter_rows(directory / "metrics.jsonl") if type(row.get("step")) is int)
    shared = ({intern(name): x for name, x in row.items()} for row in numbered)  # names take half of the memory
    rows = {(row["step"], "perf/seconds_step" in row): row for row in shared}
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0], not key[1]))]
