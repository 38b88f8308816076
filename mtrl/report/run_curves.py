"""The metric curves of one run, or of several runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrl.report.chart import Curve, Panel, draw_chart
from mtrl.utils.metric_history import History

REWARD = ("reward/overall", "val/reward_score")  # training, validation
ACCURACY = ("reward/success_rate", "val/avg@")
TITLES = {
    "reward/overall": "reward, training",
    "val/reward_score": "reward, validation",
    "reward/success_rate": "accuracy, training",
}
RATES = ("reward/success_rate", "reward/accuracy", "val/reward/accuracy", "val/avg@", "val/pass@", "val/by_")


def draw_runs(path: Path, runs: Mapping[str, History], metrics: Sequence[str] = ()) -> None:
    """Draw the given metrics of the runs, or reward and accuracy if none are given."""
    panels = metric_panels(runs, metrics or usual_metrics(runs))
    title = f"{len(runs)} runs compared"
    if len(runs) == 1:
        ((title, only),) = runs.items()
        panels = panels if metrics else usual_panels(only)
    if not panels:
        raise ValueError("no step and no validation with a reward was recorded yet")
    draw_chart(path, title, panels)


def usual_panels(run: History) -> list[Panel]:
    """A reward and an accuracy panel of one run, each with training and validation."""
    panels = []
    for title, (training, validation), bounds in (("reward", REWARD, None), ("accuracy", ACCURACY, (0.0, 1.0))):
        lines = [Curve("training", run[training], noisy=True)] if training in run else []
        lines += [Curve("validation", run[name]) for name in sorted(run) if name.startswith(validation)][:1]
        if lines:
            panels.append(Panel(title, lines, bounds))
    return panels


def metric_panels(runs: Mapping[str, History], metrics: Sequence[str]) -> list[Panel]:
    """One panel per metric, with one line per run."""
    panels = []
    for metric in metrics:
        noisy = not metric.startswith("val/")
        lines = [Curve(name, run[metric], noisy) for name, run in runs.items() if metric in run]
        if lines:
            panels.append(Panel(metric_title(metric), lines, (0.0, 1.0) if metric.startswith(RATES) else None))
    return panels


def usual_metrics(runs: Mapping[str, History]) -> list[str]:
    known = sorted({name for run in runs.values() for name in run})
    return [name for start in (*REWARD, *ACCURACY) for name in known if name.startswith(start)]


def metric_title(metric: str) -> str:
    if metric.startswith("val/avg@"):
        return f"accuracy, validation ({metric.removeprefix('val/')})"
    return TITLES.get(metric, metric)
