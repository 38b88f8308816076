"""`mtrl plot`: the curves of one run, or of several in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from mtrl.commands.load_arguments import say, started, take_option
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import read_rows_of
from mtrl.utils.errors import StartError
from mtrl.utils.machine import may_write
from mtrl.utils.metric_history import History, history, is_step

USAGE = "mtrl plot RUN... [--out FILE] [metric ...]"
METRICS = "metrics.jsonl"
FORMATS = (".png", ".svg", ".pdf")


def run(arguments: Sequence[str]) -> int:
    given, words = take_option(arguments, "--out", "name a file that ends in .png, .svg or .pdf")
    if not words:
        raise StartError(f"which run? {USAGE}")
    if option := next((word for word in words if word.startswith("--")), None):
        raise StartError(f"there is no option {option}; {USAGE}")
    paths = [Path(word) for place, word in enumerate(words) if place == 0 or Path(word).exists()]
    paths = list(dict.fromkeys(paths))
    runs = dict(zip(short_names(paths), (started(read_history, path) for path in paths), strict=True))
    metrics = known_metrics([word for word in words if Path(word) not in paths], runs)
    out = Path(given).expanduser() if given else default_place(paths, metrics)
    if out.suffix.lower() not in FORMATS:
        raise StartError(f"--out: {out}; the name of a picture ends in {', '.join(FORMATS)}")
    if not out.parent.is_dir() or not may_write(out.parent) or out.is_dir():
        raise StartError(f"{out} cannot be written; name a file in a directory that is there (--out FILE)")
    started(draw_runs, out, runs, metrics)
    print(out)
    return 0


def default_place(paths: Sequence[Path], metrics: Sequence[str]) -> Path:
    """The curve that the run itself would have drawn is the run's; any other picture goes to the working directory."""
    return paths[0] / "curve.png" if len(paths) == 1 and not metrics and paths[0].is_dir() else Path("plot.png")


def read_history(path: Path) -> History:
    """The numbers of a run, by its directory or its metrics.jsonl; lines that cannot be read are counted and said."""
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        what = f"has no {METRICS}" if path.is_dir() else "is no run: there is no such directory"
        raise StartError(f"{path} {what}; name the directory of a run, such as outputs/mtrl/zoo")
    rows = [row for row in read_rows_of(file) if is_step(row.get("step"))]
    with file.open("rb") as lines:
        damaged = sum(1 for line in lines if line.strip()) - len(rows)
    found = history(rows)
    if not found:
        raise StartError(f"{file} has no numbers of a step" + (f"; {damaged} lines are damaged" if damaged else " yet"))
    if damaged > 0:
        say(f"{file}: {damaged} of {damaged + len(rows)} lines are damaged and left out")
    return found


def known_metrics(asked: Sequence[str], runs: Mapping[str, History]) -> list[str]:
    """The metrics asked for. One that no run has is refused with those that there are; one that some lack is said."""
    known = sorted({name for run in runs.values() for name in run})
    for metric in asked:
        if metric not in known:
            near = get_close_matches(metric, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise StartError(f"{metric} is neither a run nor a metric{meant} There are {', '.join(known)}")
        if without := [name for name, run in runs.items() if metric not in run]:
            say(f"{metric}: not recorded by {', '.join(without)}")
    return list(dict.fromkeys(asked))


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart.

    >>> short_names([Path("a/x/one"), Path("b/x/one")]), short_names([Path("a/one"), Path("a/two")])
    (['a/x/one', 'b/x/one'], ['one', 'two'])
    """
    whole = [path.parent if path.name == METRICS else path for path in (path.absolute() for path in paths)]
    for count in range(1, max(len(path.parts) for path in whole)):
        names = ["/".join(path.parts[-count:]) for path in whole]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]
