"""The runs of an arm, as their directories tell: curves, what was right at the end, what a step took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from mtrl.compare.statistics import area
from mtrl.tracking.jsonl import read_rows_of
from mtrl.utils.errors import StartError
from mtrl.utils.files import regular_file
from mtrl.utils.metric_history import History, history

METRICS, VALIDATIONS, CONFIG = "metrics.jsonl", "validations.jsonl", "config.yaml"
ENDPOINTS = ("val/avg@", "val/reward_score")  # what is compared: accuracy, else reward
STEP_SECONDS = "perf/seconds_step"


@dataclass(frozen=True)
class SeedRun:
    """One run. `right`: by question, at its last validation."""

    seed: int
    curves: History
    right: Mapping[str, bool] = field(default_factory=dict)

    def final(self, metric: str) -> float:
        return self.curves[metric][-1][1]

    def area(self, metric: str) -> float:
        return area(self.curves[metric])

    @property
    def seconds(self) -> float | None:
        """The median time of a step; the first one compiles and warms up, and is left out where there are others."""
        times = [value for _, value in self.curves.get(STEP_SECONDS, ())]
        return statistics.median(times[1:] or times) if times else None


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration, by their seeds."""

    name: str
    runs: Mapping[int, SeedRun]

    def finals(self, metric: str) -> dict[int, float]:
        return {seed: run.final(metric) for seed, run in self.runs.items() if metric in run.curves}

    def areas(self, metric: str) -> dict[int, float]:
        return {seed: run.area(metric) for seed, run in self.runs.items() if metric in run.curves}

    def right(self) -> dict[str, bool]:
        return {f"{seed} {id}": right for seed, run in self.runs.items() for id, right in run.right.items()}

    @property
    def seconds(self) -> float | None:
        times = [run.seconds for run in self.runs.values() if run.seconds is not None]
        return statistics.median(times) if times else None


def read_arm(directory: Path) -> Arm:
    """A run, or a directory of the runs of one configuration: each has a seed of its own."""
    return load_arm(directory.absolute().name, run_places(directory)) or check(directory)


def load_arm(name: str, places: Iterable[Path]) -> Arm | None:
    """The runs in these places as one arm; None where there is none."""
    runs: dict[int, SeedRun] = {}
    for place in places:
        run = read_run(place)
        if run.seed in runs:
            raise StartError(f"{place}: another run of {name} has the seed {run.seed}; runs of an arm differ in it")
        runs[run.seed] = run
    return Arm(name, dict(sorted(runs.items()))) if runs else None


def check(directory: Path) -> NoReturn:
    raise StartError(f"{directory} has no run with numbers; name the directory of a run, or one that holds several")


def run_places(directory: Path) -> Iterator[Path]:
    if (directory / METRICS).is_file():
        yield directory
    elif directory.is_dir():
        yield from (place for place in sorted(directory.iterdir()) if (place / METRICS).is_file())


def read_run(directory: Path) -> SeedRun:
    return SeedRun(
        read_seed(directory), history(read_rows_of(directory / METRICS)), last_answers(directory / VALIDATIONS)
    )


def read_seed(directory: Path) -> int:
    try:
        found = yaml.safe_load(regular_file(directory / CONFIG).read_text())["dataset"]["seed"]
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise StartError(f"{directory / CONFIG} does not say the run's dataset.seed") from error
    return int(found)


def last_answers(file: Path) -> dict[str, bool]:
    """Whether each question was answered rightly when it was asked last."""
    answers: dict[str, tuple[int, bool]] = {}
    for row in read_rows_of(file):
        step, right = row.get("step"), is_right(row)
        if right is not None and isinstance(step, int) and isinstance(row.get("id"), str):
            known = answers.get(row["id"])
            answers[row["id"]] = (step, right or (known is not None and known[0] == step and known[1]))
    last = max((step for step, _ in answers.values()), default=0)
    return {name: right for name, (step, right) in answers.items() if step == last}


def is_right(row: Mapping[str, Any]) -> bool | None:
    parts = row.get("rewards")
    score = parts.get("accuracy") if isinstance(parts, Mapping) else None
    return None if score is None else score >= 0.5


def endpoint(arms: Sequence[Arm]) -> str:
    """The metric that all runs can be compared by."""
    shared = set.intersection(*({*run.curves} for arm in arms for run in arm.runs.values()))
    for start in ENDPOINTS:
        if found := sorted(name for name in shared if name.startswith(start)):
            return found[0]
    told = " or ".join(ENDPOINTS)
    raise StartError(f"the runs share no validation ({told}); set dataset.val_files and training.val_freq")
