"""Finds the runs at a path: an MTRL run, TRL's completions, verl's rollouts, or a folder of runs."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mtrl.tracking.blocks import RECORD_DIR, DamagedRecord
from mtrl.tracking.jsonl import MAX_LINE_BYTES, parse_json
from mtrl.utils.files import is_inside, is_own_file, short_names
from mtrl.utils.metric_glossary import describe_metric
from mtrl.utils.metric_history import is_number, is_step
from mtrl.view.foreign_rollouts import JsonlRollouts, ParquetRollouts
from mtrl.view.history import MetricTail
from mtrl.view.rollout_store import Json, RecordedRollouts, RolloutStore, find_refused, refusals

METRICS, ROLLOUTS, CONFIG = "metrics.jsonl", "rollouts.jsonl", "config.yaml"
LOCK, LOCK_OWNER = "run.lock", re.compile(r"process ([1-9]\d{0,8}) on (\S+)")  # checkpoint/run_directory.py writes it
OURS = (METRICS, ROLLOUTS, RECORD_DIR, CONFIG)
MAX_RUNS = 12  # the newest runs of a folder
STALE_S = 90.0  # a run that wrote nothing for so long is not live, unless its steps take longer
CONFIG_BYTES = 200_000
STATE_BYTES = 128 * 2**20  # of a trainer_state.json
AVERAGE_S = 0.5  # time per refresh for the means of responses


class NoRun(ValueError):
    """A path without a run to show."""


class RunFolder:
    """A run to show. Hold `lock` for `refresh`, `summary`, `glossary` and the history. Responses need no lock (see
    RolloutStore); `sorting` is for queries over many steps, which would otherwise all do the same work."""

    def __init__(self, name: str, path: Path, kind: str, store: RolloutStore, history: MetricTail) -> None:
        self.name, self.path, self.kind, self.store, self.history = name, path, kind, store, history
        self.lock, self.sorting = threading.Lock(), threading.Lock()
        self._state: tuple[Path, int, int] | None = None  # the trainer_state.json that was read, its size and time
        self._has_logged = False  # whether it has metrics
        self._refused: list[Path] = []  # files that are links out of the run, or pipes
        self._averaged: set[int] = set()  # steps

    def refresh(self) -> None:
        self.history.refresh()
        if self.kind == "mtrl" and isinstance(self.store, JsonlRollouts) and has_record(self.path):
            self.store = open_store(self.path, self.kind)  # the record appeared after the run was opened
        self.store.refresh()
        if self.kind == "mtrl":
            self._refused = find_refused([self.path / name for name in (METRICS, CONFIG)], self.path)
            if not is_inside(self.path / RECORD_DIR, self.path):
                self._refused.append(self.path / RECORD_DIR)
        elif not self._read_trainer_state():
            self._average()

    def summary(self) -> Json:
        steps = self.store.steps()
        return {
            "name": self.name, "path": str(self.path), "kind": self.kind, "metrics": sorted(self.history.metrics),
            "last_step": max([*list(steps)[-1:], self.history.last_step or 0], default=0),
            "steps": list(steps), "counts": list(steps.values()), "skipped": self.skipped(), "live": self.is_live(),
        }  # fmt: skip

    def glossary(self) -> dict[str, str]:
        """A line on each metric; empty for those without one, and for names of TRL and verl."""
        return {name: describe_metric(name) if self.kind == "mtrl" else "" for name in self.history.metrics}

    def skipped(self) -> list[str]:
        lines = self.history.damaged
        messages = [f"{METRICS}: {lines} lines are damaged and left out"] if lines else []
        if too_long := self.history.too_long:
            messages.append(f"{METRICS}: {too_long} lines above {MAX_LINE_BYTES // 2**20} MiB are left out")
        return messages + refusals(self._refused) + self.store.skipped()

    def is_live(self) -> bool:
        """Whether the run wrote something recently, within the time of a few steps, and its process has not ended."""
        files = [self.path / METRICS, *(self.path / RECORD_DIR).glob("part-*.bin")] if self.kind == "mtrl" else []
        times = []
        for file in files:
            with suppress(OSError):  # rotation deletes parts
                times.append(file.stat().st_mtime)
        if not times or has_ended(self.path):
            return False
        seconds = [value for _, value in self.history.metrics.get("perf/seconds_step", ())[-1:]]
        return time.time() - max(times) < max([STALE_S, *(3 * s for s in seconds)])

    def config(self) -> str | None:
        file = self.path / CONFIG
        if self.kind != "mtrl" or not is_own_file(file, self.path):
            return None
        with file.open("rb") as opened:
            return opened.read(CONFIG_BYTES).decode("utf-8", errors="replace")

    def _read_trainer_state(self) -> bool:
        """Read the log of a TRL run from its newest checkpoint, if there is one."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
        self._refused = find_refused(found, folder) if self.kind == "trl" else []
        states = [(file.stat(), file) for file in found if is_own_file(file, folder)]
        if self.kind != "trl" or not states:
            return False
        status, newest = max(states, key=lambda each: each[0].st_mtime)
        version = (newest, status.st_size, status.st_mtime_ns)
        if version == self._state:
            return self._has_logged
        self._state, self._has_logged = version, False
        try:
            with newest.open("rb") as file:
                rows = parse_json(file.read(STATE_BYTES))["log_history"]
            logged = [(row["step"], row) for row in rows if is_step(row.get("step"))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        for step, row in logged:
            for name, value in row.items():
                if name not in ("step", "epoch") and is_number(value):
                    self.history.set(str(name), step, float(value))
        self._has_logged = bool(logged)
        return self._has_logged

    def _average(self) -> None:
        """Make curves of a run without metrics from the means of its responses, some steps at a time."""
        import numpy as np

        end = time.monotonic() + AVERAGE_S
        for step in [step for step in self.store.steps() if step not in self._averaged]:
            if time.monotonic() > end:
                return
            self._averaged.add(step)
            try:
                columns = self.store.columns(step)
            except (DamagedRecord, KeyError, OSError):
                continue
            for name, values in columns.items():
                if np.isfinite(values).any():
                    self.history.set(f"{name}/mean", step, float(np.nanmean(values)))


def has_ended(path: Path) -> bool:
    """Whether the process of a run on this machine is gone. Its lock is only read: a run that starts just then must
    not find it taken."""
    file = path / LOCK
    if not is_own_file(file, path):
        return False
    try:
        with file.open("rb") as opened:
            owner = LOCK_OWNER.match(opened.read(500).decode("utf-8", errors="replace"))
        if owner is None or owner[2] != socket.gethostname():
            return False
        os.kill(int(owner[1]), 0)  # sends nothing
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user, or a file that was removed just now
        return False
    return False


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    kinds = dict(run for path in paths for run in find_runs(path))
    names = short_names(list(kinds))
    runs = []
    for name, (path, kind) in zip(names, kinds.items(), strict=True):
        history = MetricTail(path / METRICS if kind == "mtrl" else path / "none" / METRICS, path)
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
        return ParquetRollouts(path / "completions" if (path / "completions").is_dir() else path, path)
    if kind == "verl":
        files = list(path.glob("*.jsonl")) if path.is_dir() else [path]
        files.sort(key=lambda file: (int(file.stem) if file.stem.isdecimal() else 0, file.name))
        return JsonlRollouts(path, files)
    if (path / ROLLOUTS).exists() and not has_record(path):
        return JsonlRollouts(path, rotating=path / ROLLOUTS)
    return RecordedRollouts(path / RECORD_DIR)


def has_record(path: Path) -> bool:
    return (path / RECORD_DIR).is_dir() and is_inside(path / RECORD_DIR, path)
