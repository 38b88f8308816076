"""The curves of runs, from the rows of their metrics.jsonl: one run by itself, or several compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from mtrl.report.chart import Line, Panel, Points, draw_chart

History = Mapping[str, Points]  # a run: (step, value) of each metric by name

HEAD = ("step", "attempt", "time")  # what a row says of itself
REWARD = ("reward/overall", "val/reward_score")  # of training and of validation
ACCURACY = ("reward/success_rate", "val/avg@")
TITLES = {
    "reward/overall": "reward, training",
    "val/reward_score": "reward, validation",
    "reward/success_rate": "accuracy, training",
}
RATES = ("reward/success_rate", "reward/accuracy", "val/reward/accuracy", "val/avg@", "val/pass@", "val/by_")
LARGEST = 1e100  # beyond it an axis could not be divided; such a number says no more than infinity


def history(rows: Iterable[Mapping[str, Any]]) -> History:
    """The numbers of a run by name. What an attempt did after the step where the next one began was undone."""
    found: dict[str, dict[int, float]] = {}
    attempt: Any = None
    for row in rows:
        step = row.get("step")
        if not is_step(step):
            continue
        if row.get("attempt") != attempt:
            attempt = row.get("attempt")
            begin = step + any(name.startswith("val/") for name in row)  # a validation comes after its step
            found = {name: {s: y for s, y in points.items() if s < begin} for name, points in found.items()}
        for name, value in row.items():
            if name not in HEAD and is_number(value):
                found.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in found.items() if points}


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def draw_runs(path: Path, runs: Mapping[str, History], metrics: Sequence[str] = ()) -> None:
    """Draws the metrics of runs by name, those that are there; without metrics: reward and accuracy."""
    panels = metric_panels(runs, metrics or usual_metrics(runs))
    title = f"{len(runs)} runs compared"
    if len(runs) == 1:
        ((title, only),) = runs.items()
        panels = panels if metrics else usual_panels(only)
    if not panels:
        raise ValueError("no step and no validation with a reward was recorded yet")
    draw_chart(path, title, panels)


def usual_panels(run: History) -> list[Panel]:
    """Reward and accuracy of one run, those of training and of validation in one panel."""
    panels = []
    for title, (training, validation), bounds in (("reward", REWARD, None), ("accuracy", ACCURACY, (0.0, 1.0))):
        lines = [Line("training", run[training], noisy=True)] if training in run else []
        lines += [Line("validation", run[name]) for name in sorted(run) if name.startswith(validation)][:1]
        if lines:
            panels.append(Panel(title, lines, bounds))
    return panels


def metric_panels(runs: Mapping[str, History], metrics: Sequence[str]) -> list[Panel]:
    """A panel a metric, and in it a line a run."""
    panels = []
    for metric in metrics:
        noisy = not metric.startswith("val/")
        lines = [Line(name, run[metric], noisy) for name, run in runs.items() if metric in run]
        if lines:
            panels.append(Panel(title_of(metric), lines, (0.0, 1.0) if metric.startswith(RATES) else None))
    return panels


def usual_metrics(runs: Mapping[str, History]) -> list[str]:
    known = sorted({name for run in runs.values() for name in run})
    return [name for start in (*REWARD, *ACCURACY) for name in known if name.startswith(start)]


def title_of(metric: str) -> str:
    if metric.startswith("val/avg@"):
        return f"accuracy, validation ({metric.removeprefix('val/')})"
    return TITLES.get(metric, metric)
