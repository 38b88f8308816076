"""Draw the curves of a run, or of several runs in one picture.

mtrl plot RUN... [--out FILE] [metric ...]

Draws reward and accuracy, in training and at each validation, or the named metrics: any in metrics.jsonl, such as
actor/entropy or val/avg@1. FILE ends in .png, .svg or .pdf. Without it, the picture of one run and no named
metrics is the run's curve.png, and any other is plot.png in the working directory. Prints the path of the picture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from mtrl.commands.load_arguments import OptionParser, check_call, log_line
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import iter_rows
from mtrl.utils.errors import StartError
from mtrl.utils.files import short_names
from mtrl.utils.machine import is_writable
from mtrl.utils.metric_history import History, MetricCurves

METRICS = "metrics.jsonl"
FORMATS = (".png", ".svg", ".pdf")
OPTIONS = OptionParser(__doc__, "--out")


def run(arguments: Sequence[str]) -> int:
    options, names = OPTIONS.parse_paths(arguments)
    if not names:
        OPTIONS.error("which run?")
    paths = [Path(name) for index, name in enumerate(names) if index == 0 or os.path.exists(name)]
    paths = list(dict.fromkeys(paths))
    run_dirs = [path.parent if path.name == METRICS else path for path in (path.absolute() for path in paths)]
    labels = short_names(run_dirs) if len(set(run_dirs)) == len(paths) else map(str, paths)
    runs = dict(zip(labels, (check_call(read_history, path) for path in paths), strict=True))
    metrics = check_metrics([name for name in names if Path(name) not in paths], runs)
    is_own_curve = len(paths) == 1 and not metrics and paths[0].is_dir()  # the picture that the run itself draws
    default = paths[0] / "curve.png" if is_own_curve else Path("plot.png")
    out = Path(options.out).expanduser() if options.out else default
    if out.suffix.lower() not in FORMATS:
        raise StartError(f"--out: {out}; the name of a picture ends in {', '.join(FORMATS)}")
    if not out.parent.is_dir() or not is_writable(out.parent) or out.is_dir():
        raise StartError(f"{out} cannot be written; name a file in an existing directory (--out FILE)")
    check_call(draw_runs, out, runs, metrics)
    print(out)
    return 0


def read_history(path: Path) -> History:
    """The metrics of a run, by its directory or its metrics.jsonl; damaged lines are counted and reported."""
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        problem = f"has no {METRICS}" if path.is_dir() else "is no run: there is no such directory"
        raise StartError(f"{path} {problem}; name the directory of a run, such as outputs/mtrl/zoo")
    curves = MetricCurves()
    rows = sum(curves.add(row) for row in iter_rows(file))
    with file.open("rb") as lines:
        damaged = sum(1 for line in lines if line.strip()) - rows
    metrics = curves.to_history()
    if not metrics:
        raise StartError(f"{file} has no numbers of a step" + (f"; {damaged} lines are damaged" if damaged else " yet"))
    if damaged > 0:
        log_line(f"{file}: {damaged} of {damaged + rows} lines are damaged and left out")
    return metrics


def check_metrics(names: Sequence[str], runs: Mapping[str, History]) -> list[str]:
    """The metrics without duplicates. One that no run has is an error; one that some runs lack is reported."""
    known = sorted({name for run in runs.values() for name in run})
    for metric in names:
        if metric not in known:
            near = get_close_matches(metric, known, n=1)
            suggestion = f"; did you mean {near[0]}?" if near else "."
            raise StartError(f"{metric} is neither a run nor a metric{suggestion} There are {', '.join(known)}")
        if without := [name for name, run in runs.items() if metric not in run]:
            log_line(f"{metric}: not recorded by {', '.join(without)}")
    return list(dict.fromkeys(names))
