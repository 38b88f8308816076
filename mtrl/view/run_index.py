"""Finds the runs at a path: an MTRL run, TRL's completions, verl's rollouts, or a folder of runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mtrl.tracking.blocks import RECORD_DIR, DamagedRecord
from mtrl.utils.files import short_names
from mtrl.utils.metric_history import is_number
from mtrl.view.foreign_rollouts import JsonlRollouts, ParquetRollouts
from mtrl.view.history import MetricTail
from mtrl.view.rollout_store import Json, RecordedRollouts, RolloutStore

METRICS, ROLLOUTS, CONFIG = "metrics.jsonl", "rollouts.jsonl", "config.yaml"
OURS = (METRICS, ROLLOUTS, RECORD_DIR, CONFIG)
MAX_RUNS = 12  # the newest runs of a folder
STALE_S = 90.0  # a run that wrote nothing for so long is not live, unless its steps take longer
CONFIG_CHARS = 200_000


class NoRun(ValueError):
    """A path without a run to show."""


class RunFolder:
    """A run to show. Hold `lock` while using it: its files are read on demand by one thread at a time."""

    def __init__(self, name: str, path: Path, kind: str, store: RolloutStore, history: MetricTail) -> None:
        self.name, self.path, self.kind, self.store, self.history = name, path, kind, store, history
        self.lock = threading.Lock()
        self._averaged: set[int] = set()  # steps

    def refresh(self) -> None:
        self.history.refresh()
        if self.kind == "mtrl" and isinstance(self.store, JsonlRollouts) and (self.path / RECORD_DIR).is_dir():
            self.store = open_store(self.path, self.kind)  # the record appeared after the run was opened
        self.store.refresh()
        if self.kind != "mtrl" and not self._read_trainer_state():
            self._average()

    def summary(self) -> Json:
        steps = self.store.steps()
        return {
            "name": self.name, "path": str(self.path), "kind": self.kind, "metrics": sorted(self.history.metrics),
            "last_step": max([*list(steps)[-1:], self.history.last_step or 0], default=0),
            "steps": list(steps), "counts": list(steps.values()), "skipped": self.skipped(), "live": self.is_live(),
        }  # fmt: skip

    def skipped(self) -> list[str]:
        lines = self.history.damaged
        messages = [f"{METRICS}: {lines} lines are damaged and left out"] if lines else []
        return messages + self.store.skipped()

    def is_live(self) -> bool:
        """Whether the run wrote something recently, within the time of a few steps."""
        files = [self.path / METRICS, *(self.path / RECORD_DIR).glob("part-*.bin")] if self.kind == "mtrl" else []
        times = [file.stat().st_mtime for file in files if file.is_file()]
        seconds = list(self.history.metrics.get("perf/seconds_step", {}).values())[-1:]
        return bool(times) and time.time() - max(times) < max([STALE_S, *(3 * s for s in seconds)])

    def config(self) -> str | None:
        file = self.path / CONFIG
        if self.kind != "mtrl" or not file.is_file() or not is_inside(file, self.path):
            return None
        return file.read_text(encoding="utf-8", errors="replace")[:CONFIG_CHARS]

    def _read_trainer_state(self) -> bool:
        """Read the log of a TRL run from its newest checkpoint, if there is one."""
        folder = self.path if self.path.is_dir() else self.path.parent
        states = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
        if self.kind != "trl" or not states:
            return False
        newest = max(states, key=lambda file: file.stat().st_mtime)
        try:
            rows = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
            logged = [(row["step"], row) for row in rows if type(row.get("step")) is int]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        for step, row in logged:
            for name, value in row.items():
                if name not in ("step", "epoch") and is_number(value):
                    self.history.metrics.setdefault(str(name), {})[step] = float(value)
        return bool(logged)

    def _average(self) -> None:
        """Make curves of a run without metrics from the means of its responses, 200 steps at a time."""
        import numpy as np

        for step in [step for step in self.store.steps() if step not in self._averaged][:200]:
            self._averaged.add(step)
            try:
                columns = self.store.columns(step)
            except (DamagedRecord, KeyError, OSError):
                continue
            for name, values in columns.items():
                if np.isfinite(values).any():
                    self.history.metrics.setdefault(f"{name}/mean", {})[step] = float(np.nanmean(values))


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    kinds = dict(run for path in paths for run in find_runs(path))
    names = short_names(list(kinds))
    runs = []
    for name, (path, kind) in zip(names, kinds.items(), strict=True):
        metrics = path / METRICS
        is_ours = kind == "mtrl" and is_inside(metrics, path)
        history = MetricTail(metrics if is_ours else path / "none" / METRICS)
        runs.append(RunFolder(name, path, kind, open_store(path, kind), history))
    return runs


def find_runs(path: Path) -> list[tuple[Path, str]]:
    """The runs at a path, with their kinds."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise NoRun(f"{path}: no such directory; name the directory of a run, such as outputs/mtrl/zoo")
    if path.name in (METRICS, ROLLOUTS):
        path = path.parent
    if kind := run_kind(path):
        return [(path, kind)]
    inside = [(child, kind) for child in path.iterdir() if (kind := run_kind(child))] if path.is_dir() else []
    if not inside:
        raise NoRun(
            f"{path} holds no run: neither {METRICS} nor {RECORD_DIR}/, nor completions of TRL (*.parquet), nor "
            "rollouts of verl (*.jsonl)"
        )
    newest = sorted(inside, key=lambda each: -each[0].stat().st_mtime)[:MAX_RUNS]
    return sorted(newest)


def run_kind(path: Path) -> str | None:
    if path.is_file():
        return {".parquet": "trl", ".jsonl": "verl"}.get(path.suffix)
    if not path.is_dir():
        return None
    if any((path / name).exists() for name in OURS):
        return "mtrl"
    if any((path / "completions").glob("*.parquet")) or any(path.glob("*.parquet")):
        return "trl"
    return "verl" if any(path.glob("*.jsonl")) else None


def open_store(path: Path, kind: str) -> RolloutStore:
    if kind == "trl":
        return ParquetRollouts(path / "completions" if (path / "completions").is_dir() else path)
    if kind == "verl":
        files = list(path.glob("*.jsonl")) if path.is_dir() else [path]
        files.sort(key=lambda file: (int(file.stem) if file.stem.isdecimal() else 0, file.name))
        return JsonlRollouts([file for file in files if is_inside(file, path)])
    record, rollouts = path / RECORD_DIR, path / ROLLOUTS
    if not is_inside(record, path) or not is_inside(rollouts, path):
        return JsonlRollouts()  # links that lead out of the run are not read
    return JsonlRollouts(rotating=rollouts) if rollouts.exists() and not record.is_dir() else RecordedRollouts(record)


def is_inside(file: Path, directory: Path) -> bool:
    """Whether a file is really in the run's directory: a link may lead anywhere."""
    return file.resolve().is_relative_to(directory.resolve())
