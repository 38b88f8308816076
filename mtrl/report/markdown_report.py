"""Runs in a Markdown table: the metrics that a paper reports, with their first, last and highest values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mtrl.report.markdown_text import escape_markup, number, table
from mtrl.report.run_curves import usual_metrics
from mtrl.utils.metric_history import History

ALSO = ("response_length/mean", "actor/entropy", "attention/vgr_all", "perf/seconds_step", "perf/tokens_per_second")


def write_markdown(path: Path, runs: Mapping[str, History], picture: Path | None) -> None:
    parts = ["# " + ", ".join(map(escape_markup, runs))]
    if picture is not None:
        parts.append(f"![curves]({picture.name})")
    parts += [make_section(name, run) for name, run in runs.items()]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def make_section(name: str, run: History) -> str:
    last = max((points[-1][0] for points in run.values() if points), default=0)
    rows = []
    for metric in dict.fromkeys([*usual_metrics({name: run}), *(each for each in ALSO if each in run)]):
        points = run[metric]
        step, highest = max(points, key=lambda point: point[1])
        values = (number(x) for x in (points[0][1], points[-1][1], highest))
        rows.append([escape_markup(metric), *values, f"{step:g}"])
    metrics = table(["metric", "first", "last", "highest", "at step"], rows)
    return f"## {escape_markup(name)}\n\n{last:g} steps.\n\n{metrics}"
