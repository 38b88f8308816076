"""Write a run, or several, into one HTML file to share.

mtrl report RUN_DIR [RUN_DIR ...] [--out DIR] [--rollouts 64]

report.html shows what mtrl view shows, in one file without a server or network: curves, and responses from the first
step to the last with their images and heat maps. Next to it are report.md and curves.png, for a paper. DIR defaults to
RUN_DIR/report. Prints the paths of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrl.commands.load_arguments import OptionParser, whole_number
from mtrl.report.markdown_report import write_markdown
from mtrl.report.run_curves import draw_runs
from mtrl.utils.errors import StartError
from mtrl.view.html_page import single_page
from mtrl.view.run_index import NoRun, RunFolder, open_runs
from mtrl.view.shared_view import collect_report

OPTIONS = OptionParser(__doc__, "--out")
OPTIONS.add_argument("--rollouts", type=whole_number(0), default=64)


def run(arguments: Sequence[str]) -> int:
    options, paths = OPTIONS.parse_paths(arguments)
    if not paths:
        OPTIONS.error("which run?")
    try:
        runs = open_runs([Path(path) for path in paths])
        for each in runs:
            each.refresh()
    except (NoRun, OSError) as error:
        raise StartError(str(error)) from error
    default = runs[0].path / "report" if len(runs) == 1 and runs[0].path.is_dir() else Path("report")
    out = Path(options.out).expanduser() if options.out else default
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = write_report(runs, out, options.rollouts)
    except OSError as error:
        raise StartError(f"{out} cannot be written ({error}); name a directory with --out") from error
    print("\n".join(map(str, files)))
    return 0


def write_report(runs: Sequence[RunFolder], out: Path, count: int) -> list[Path]:
    """Write the files of the report with `count` responses, and return their paths."""
    page = out / "report.html"
    page.write_text(single_page(collect_report(runs, count)), encoding="utf-8")
    histories = {run.name: run.history.to_history() for run in runs}
    picture: Path | None = out / "curves.png"
    try:
        draw_runs(out / "curves.png", histories)
    except ValueError:
        picture = None  # no step has a reward yet
    table = out / "report.md"
    write_markdown(table, histories, picture)
    return [path for path in (page, table, picture) if path is not None]
