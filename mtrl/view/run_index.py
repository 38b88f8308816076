"""What a path on the command line means: a run of ours, TRL's completions, verl's rollouts, or a folder of runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mtrl.tracking.blocks import RECORD, DamagedRecord
from mtrl.view.foreign_rollouts import JsonlRollouts, ParquetRollouts, is_finite
from mtrl.view.history import MetricTail
from mtrl.view.rollout_store import Json, RecordedRollouts, RolloutStore

METRICS, ROLLOUTS, CONFIG = "metrics.jsonl", "rollouts.jsonl", "config.yaml"
OURS = (METRICS, ROLLOUTS, RECORD, CONFIG)
MOST_RUNS = 12  # of a folder of runs: the newest
STALE_S = 90.0  # after so long without a line a run is no longer called live, unless its steps take longer
CONFIG_CHARS = 200_000


class NoRun(ValueError):
    """A path that holds nothing to show; the text says what would."""


class RunFolder:
    """A run that is shown. Whoever asks holds `lock`: its files are read on demand, by one at a time."""

    def __init__(self, name: str, path: Path, kind: str, book: RolloutStore, history: MetricTail) -> None:
        self.name, self.path, self.kind, self.book, self.history = name, path, kind, book, history
        self.lock = threading.Lock()
        self._means: dict[int, dict[str, float]] = {}

    def refresh(self) -> None:
        self.history.refresh()
        if self.kind == "mtrl" and isinstance(self.book, JsonlRollouts):
            self.book = open_book(self.path, self.kind) if (self.path / RECORD).is_dir() else self.book
        self.book.refresh()
        if self.kind != "mtrl" and not self._from_trainer_state():
            self._average()

    def about(self) -> Json:
        steps = self.book.steps()
        return {
            "name": self.name, "path": str(self.path), "kind": self.kind, "metrics": sorted(self.history.metrics),
            "last_step": max([*list(steps)[-1:], self.history.last_step or 0], default=0),
            "steps": list(steps), "counts": list(steps.values()), "skipped": self.skipped(), "live": self.is_live(),
        }  # fmt: skip

    def skipped(self) -> list[str]:
        lines = self.history.damaged
        told = [f"{METRICS}: {lines} lines are damaged and left out"] if lines else []
        return told + self.book.skipped()

    def is_live(self) -> bool:
        """Whether something was written lately: within a few steps' time."""
        files = [self.path / METRICS, *(self.path / RECORD).glob("part-*.bin")] if self.kind == "mtrl" else []
        times = [file.stat().st_mtime for file in files if file.is_file()]
        seconds = list(self.history.metrics.get("perf/seconds_step", {}).values())[-1:]
        return bool(times) and time.time() - max(times) < max([STALE_S, *(3 * s for s in seconds)])

    def config(self) -> str | None:
        file = self.path / CONFIG
        if self.kind != "mtrl" or not file.is_file() or not is_inside(file, self.path):
            return None
        return file.read_text(encoding="utf-8", errors="replace")[:CONFIG_CHARS]

    def _from_trainer_state(self) -> bool:
        """The log of a TRL run, which its checkpoints carry."""
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
                if name not in ("step", "epoch") and is_finite(value):
                    self.history.metrics.setdefault(str(name), {})[step] = float(value)
        return bool(logged)

    def _average(self) -> None:
        """Curves of a run that has none: the means of what was recorded, of a few steps at a time."""
        import numpy as np

        for step in [step for step in self.book.steps() if step not in self._means][:200]:
            try:
                numbers = self.book.page(step).numbers
            except (DamagedRecord, KeyError, OSError):
                numbers = {}
            self._means[step] = {}
            for name, values in numbers.items():
                if np.isfinite(values).any():
                    self.history.metrics.setdefault(f"{name}/mean", {})[step] = float(np.nanmean(values))


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    found = [(path, kind) for given in paths for path, kind in runs_at(given)]
    unique = list(dict(found).items())
    return [
        open_run(name, path, kind)
        for name, (path, kind) in zip(short_names([p for p, _ in unique]), unique, strict=True)
    ]


def runs_at(path: Path) -> list[tuple[Path, str]]:
    """The runs that a path names, with their kinds."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise NoRun(f"{path}: there is no such directory; name the directory of a run, such as outputs/mtrl/zoo")
    if path.name in (METRICS, ROLLOUTS):
        path = path.parent
    if kind := run_kind(path):
        return [(path, kind)]
    inside = [(child, kind) for child in path.iterdir() if (kind := run_kind(child))] if path.is_dir() else []
    if not inside:
        raise NoRun(
            f"{path} holds no run: neither {METRICS} nor {RECORD}/ of a run, nor completions of TRL (*.parquet), nor "
            "rollouts of verl (*.jsonl)"
        )
    newest = sorted(inside, key=lambda each: -each[0].stat().st_mtime)[:MOST_RUNS]
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


def open_run(name: str, path: Path, kind: str) -> RunFolder:
    metrics = path / METRICS
    history = MetricTail(metrics if kind == "mtrl" and is_inside(metrics, path) else path / "none" / METRICS)
    return RunFolder(name, path, kind, open_book(path, kind), history)


def open_book(path: Path, kind: str) -> RolloutStore:
    if kind == "trl":
        return ParquetRollouts(path / "completions" if (path / "completions").is_dir() else path)
    if kind == "verl":
        files = sorted(path.glob("*.jsonl"), key=by_number) if path.is_dir() else [path]
        return JsonlRollouts([file for file in files if is_inside(file, path)])
    recorded = path / RECORD
    if not is_inside(recorded, path) or not is_inside(path / ROLLOUTS, path):
        return JsonlRollouts()  # links that lead out of the run: nothing is read there
    without = (path / ROLLOUTS).exists() and not recorded.is_dir()
    return JsonlRollouts(rotating=path / ROLLOUTS) if without else RecordedRollouts(recorded)


def by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdecimal() else 0, path.name)


def is_inside(file: Path, directory: Path) -> bool:
    """Whether a file of a run really lies there: a link may lead anywhere."""
    return file.resolve().is_relative_to(directory.resolve())


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart."""
    longest = max((len(path.parts) for path in paths), default=1)
    for count in range(1, longest):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]
