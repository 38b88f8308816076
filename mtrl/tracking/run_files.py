"""metrics.jsonl and rollouts.jsonl: append-only, a row a step, a row a response.

Rows carry `step` and `attempt`; where a step was done twice, readers take the last attempt.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrl.types import Rewards, Rollouts


class RunFiles:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.metrics_path, self.rollouts_path = directory / "metrics.jsonl", directory / "rollouts.jsonl"
        for path in (self.metrics_path, self.rollouts_path):
            end_last_line(path)
        self.attempt = 1 + max((row["attempt"] for row in read_rows(self.metrics_path)), default=0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append(self.metrics_path, [{**self._head(step), **values}])

    def validation(self, step: int, values: Mapping[str, float], by: Mapping[str, Mapping[str, float]]) -> None:
        tables = {f"val/by_{column}/{value}": rate for column, table in by.items() for value, rate in table.items()}
        self._append(self.metrics_path, [{**self._head(step), **values, **tables}])

    def rollouts(self, step: int, rollouts: Rollouts, rewards: Rewards) -> None:
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
                "finish": rollouts.finish[i],
            }
            for i, task in enumerate(tasks)
        ]
        self._append(self.rollouts_path, rows)

    def close(self) -> None: ...

    def _head(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}

    def _append(self, path: Path, rows: list[dict[str, Any]]) -> None:
        lines = [json.dumps(without_nan(row), ensure_ascii=False, default=str) + "\n" for row in rows]
        with path.open("a", encoding="utf-8") as out:
            out.writelines(lines)


def without_nan(value: Any) -> Any:
    """JSON has no NaN: what does not apply is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def end_last_line(path: Path) -> None:
    """A line that a crash cut off must not swallow the next one."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read() != b"\n":
            file.write(b"\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every whole row of a JSONL file; lines that were cut off by a crash are left out."""
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows
