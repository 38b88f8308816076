"""Runs in a Markdown table: the numbers that a paper reports, at the start, at the best and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mtrl.report.escape import shorten
from mtrl.report.run_curves import usual_metrics
from mtrl.utils.metric_history import History
from mtrl.utils.terminal import sanitize

ALSO = ("response_length/mean", "actor/entropy", "attention/vgr_all", "perf/seconds_step", "perf/tokens_per_second")
NAME_CHARS = 80


def write_markdown(path: Path, runs: Mapping[str, History], picture: Path | None) -> None:
    parts = ["# " + ", ".join(cell(name) for name in runs)]
    if picture is not None:
        parts.append(f"![curves]({picture.name})")
    parts += [section(name, run) for name, run in runs.items()]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def section(name: str, run: History) -> str:
    last = max((points[-1][0] for points in run.values() if points), default=0)
    rows = ["| metric | first | last | highest | at step |", "|---|---|---|---|---|"]
    for metric in dict.fromkeys([*usual_metrics({name: run}), *(each for each in ALSO if each in run)]):
        points = run[metric]
        step, best = max(points, key=lambda point: point[1])
        rows.append(f"| {cell(metric)} | {points[0][1]:.4g} | {points[-1][1]:.4g} | {best:.4g} | {step:g} |")
    return f"## {cell(name)}\n\n{last:g} steps.\n\n" + "\n".join(rows)


def cell(text: str) -> str:
    """A name in a table or a heading: nothing in it is markup."""
    line = shorten(sanitize(text).replace("\n", " "), NAME_CHARS)
    return "".join(f"\\{sign}" if sign in "\\|`*_[]<>#!" else sign for sign in line)
