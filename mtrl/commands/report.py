"""`mtrl report`: a run in one HTML file to hand on, and in Markdown with a picture for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrl.report.markdown_report import write_markdown
from mtrl.report.run_curves import draw_runs
from mtrl.utils.errors import StartError
from mtrl.view.html_page import single_page
from mtrl.view.run_index import NoRun, RunFolder, open_runs
from mtrl.view.shared_view import shared

USAGE = "mtrl report RUN_DIR [RUN_DIR ...] [--out DIR] [--rollouts N]"
ROLLOUTS = 64  # responses in a report


def run(arguments: Sequence[str]) -> int:
    paths, given, count = parse(arguments)
    try:
        runs = open_runs(paths)
        for each in runs:
            each.refresh()
    except (NoRun, OSError) as error:
        raise StartError(str(error)) from error
    out = given or default_place(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = write(runs, out, count)
    except OSError as error:
        raise StartError(f"{out} cannot be written ({error}); name a directory with --out") from error
    print("\n".join(map(str, written)))
    return 0


def parse(arguments: Sequence[str]) -> tuple[list[Path], Path | None, int]:
    """(runs, directory, how many responses)"""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    paths: list[Path] = []
    out, count = None, ROLLOUTS
    while words:
        word = words.pop(0)
        if word not in ("--out", "--rollouts"):
            if word.startswith("--"):
                raise StartError(f"there is no option {word}; {USAGE}")
            paths.append(Path(word))
            continue
        if not words:
            raise StartError(f"{word} needs a value; {USAGE}")
        value = words.pop(0)
        if word == "--out":
            out = Path(value).expanduser()
        elif value.isdecimal():
            count = int(value)
        else:
            raise StartError(f"--rollouts: {value!r} is no number")
    if not paths:
        raise StartError(f"which run? {USAGE}")
    return paths, out, count


def default_place(runs: Sequence[RunFolder]) -> Path:
    """In the run, where there is one and it is a directory; several share the working directory."""
    return runs[0].path / "report" if len(runs) == 1 and runs[0].path.is_dir() else Path("report")


def write(runs: Sequence[RunFolder], out: Path, count: int) -> list[Path]:
    page = out / "report.html"
    page.write_text(single_page(shared(runs, count)), encoding="utf-8")
    histories = {
        run.name: {name: sorted(points.items()) for name, points in run.history.metrics.items()} for run in runs
    }
    picture: Path | None = out / "curves.png"
    try:
        draw_runs(out / "curves.png", histories)
    except ValueError:
        picture = None  # no step has a reward yet
    table = out / "report.md"
    write_markdown(table, histories, picture)
    return [path for path in (page, table, picture) if path is not None]
