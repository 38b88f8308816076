"""The runs of an arm, read from their directories: metric curves, correct answers at the end, settings, seconds per
step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mtrl.compare.statistics import area
from mtrl.tracking.jsonl import iter_rows
from mtrl.utils.errors import StartError
from mtrl.utils.files import regular_file
from mtrl.utils.metric_history import History, history

METRICS, VALIDATIONS, CONFIG = "metrics.jsonl", "validations.jsonl", "config.yaml"
ENDPOINTS = ("val/avg@", "val/reward_score")  # metrics to compare: accuracy, else reward
STEP_SECONDS = "perf/seconds_step"
OF_EACH_RUN = (  # settings in which the runs of an arm differ
    "dataset.seed", "worker.rollout.seed", "training.output_dir", "training.project_name", "training.experiment_name",
)  # fmt: skip


@dataclass(frozen=True)
class SeedRun:
    """One run. `correct`: whether each question of the last validation was answered correctly, by its id. `settings`:
    its keys with their values as JSON."""

    seed: int
    curves: History
    correct: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def final(self, metric: str) -> float:
        return self.curves[metric][-1][1]

    def area(self, metric: str) -> float:
        return area(self.curves[metric])

    @property
    def seconds(self) -> float | None:
        """The median seconds per step, without the first step (it compiles and warms up) if there are others."""
        times = [value for _, value in self.curves.get(STEP_SECONDS, ())]
        return statistics.median(times[1:] or times) if times else None


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration, by seed."""

    name: str
    runs: Mapping[int, SeedRun]

    def finals(self, metric: str) -> dict[int, float]:
        return {seed: run.final(metric) for seed, run in self.runs.items() if metric in run.curves}

    def areas(self, metric: str) -> dict[int, float]:
        return {seed: run.area(metric) for seed, run in self.runs.items() if metric in run.curves}

    def correct(self) -> dict[str, bool]:
        return {f"{seed} {id}": correct for seed, run in self.runs.items() for id, correct in run.correct.items()}

    @property
    def settings(self) -> dict[str, str]:
        """Those that belong to the arm and not to one of its runs. Runs that disagree have several values."""
        values: dict[str, list[str]] = {}
        for run in self.runs.values():
            for key in run.settings.keys() - set(OF_EACH_RUN):
                values.setdefault(key, []).append(run.settings[key])
        return {key: " or ".join(dict.fromkeys(each)) for key, each in values.items()}

    @property
    def seconds(self) -> float | None:
        times = [run.seconds for run in self.runs.values() if run.seconds is not None]
        return statistics.median(times) if times else None


def read_arm(directory: Path) -> Arm:
    """Read one run, or a directory with the runs of one configuration, each with a different seed."""
    if (directory / METRICS).is_file():
        runs = [directory]
    else:
        runs = sorted(file.parent for file in directory.glob(f"*/{METRICS}") if file.is_file())
    arm = load_arm(directory.absolute().name, runs)
    if arm is None:
        raise StartError(f"{directory} holds no run with metrics; name the directory of a run, or one of several runs")
    return arm


def load_arm(name: str, run_dirs: Iterable[Path]) -> Arm | None:
    """Read these runs as one arm; None if there are none."""
    runs: dict[int, SeedRun] = {}
    for directory in run_dirs:
        settings = read_settings(directory)
        seed = int(settings["dataset.seed"])
        if seed in runs:
            raise StartError(
                f"{directory}: another run of {name} has the seed {seed}; the runs of an arm need different seeds"
            )
        curves, answers = history(iter_rows(directory / METRICS)), read_answers(directory / VALIDATIONS)
        runs[seed] = SeedRun(seed, curves, answers, settings)
    return Arm(name, dict(sorted(runs.items()))) if runs else None


def read_settings(directory: Path) -> dict[str, str]:
    """The keys of a run with their values as JSON; `dataset.seed` is a number."""
    try:
        tree = yaml.safe_load(regular_file(directory / CONFIG).read_text())
        seed = str(int(tree["dataset"]["seed"]))
        return {**flatten(tree), "dataset.seed": seed}
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise StartError(f"{directory / CONFIG} has no dataset.seed") from error


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """
    >>> flatten({"worker": {"rollout": {"n": 4}}, "optimization": {"credit": ["pgpo"]}})
    {'worker.rollout.n': '4', 'optimization.credit': '["pgpo"]'}
    """
    leaves: dict[str, str] = {}
    for name, value in tree.items():
        within = isinstance(value, Mapping) and value
        leaves |= flatten(value, f"{prefix}{name}.") if within else {f"{prefix}{name}": json.dumps(value, default=str)}
    return leaves


def read_answers(file: Path) -> dict[str, bool]:
    """Whether each question of the last validation was answered correctly, by any of its responses."""
    answers: dict[str, tuple[int, bool]] = {}
    for row in iter_rows(file):
        step, correct = row.get("step"), is_correct(row)
        if correct is not None and isinstance(step, int) and isinstance(row.get("id"), str):
            known = answers.get(row["id"])
            answers[row["id"]] = (step, correct or (known is not None and known[0] == step and known[1]))
    last = max((step for step, _ in answers.values()), default=0)
    return {name: correct for name, (step, correct) in answers.items() if step == last}


def is_correct(row: Mapping[str, Any]) -> bool | None:
    parts = row.get("rewards")
    score = parts.get("accuracy") if isinstance(parts, Mapping) else None
    return None if score is None else score >= 0.5


def choose_endpoint(arms: Sequence[Arm]) -> str:
    """The metric that all runs can be compared by."""
    shared = set.intersection(*({*run.curves} for arm in arms for run in arm.runs.values()))
    for prefix in ENDPOINTS:
        if names := sorted(name for name in shared if name.startswith(prefix)):
            return names[0]
    wanted = " or ".join(ENDPOINTS)
    raise StartError(
        f"the runs have no validation metric in common ({wanted}); set dataset.val_files and training.val_freq"
    )
