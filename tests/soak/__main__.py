"""Stress tests that take hours: `make soak`, or some of them, side by side, in portions:

    python tests/soak [TRIAL ..] [--parallel 12] [--minutes 9] [--out soak.json] [--count N] [--dir build/soak]

kills              50 x SIGKILL at start-up, in a step and while saving; each resumed bitwise, no process or file left
signals            20 x SIGTERM and SIGINT, the same
lora               20 x SIGKILL of a run with adapters, the same
ranks              20 x SIGKILL of a rank of two by Ray, once of their driver: the run resumes by itself, bitwise
ranks_combined     the same with critic, adapters and replay
torchrun           20 x SIGKILL of a rank of two without Ray, the first or the second, the same
torchrun_combined  the same with critic, adapters and replay
torchrun_offloaded the same as torchrun_combined, with all offloading
compare            20 x SIGKILL of `mtrl compare` or of a process that it has started: the same results in the end
view               10,000 odd requests to `mtrl view` of damaged run folders, while a run writes
configs            10,000 damaged configurations: no traceback, no hang
rows               10,000 damaged rows and images: the same, and every row accounted for
long               1,000 steps with everything on: memory, files and threads do not grow

A trial has a folder DIR/TRIAL with its ledger and its output (said.txt). After --minutes, or if it is stopped
otherwise, the same command continues; a passed trial is not repeated. `long` measures one process and begins anew.
Exit status 1: a trial failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

KILL, ASK = [signal.SIGKILL], [signal.SIGTERM, signal.SIGINT]
TRIALS: dict[str, tuple[str, dict[str, Any]]] = {  # module, function and its size first; the longest trials first
    "long": ("long_run.long_run", {"steps": 1000, "most": 0.02}),
    "kills": ("struck_runs.strikes", {"count": 50, "signals": KILL}),
    "ranks": ("lost_ranks.lost_ranks", {"count": 20}),
    "ranks_combined": ("lost_ranks.lost_ranks", {"count": 20, "combined": True}),
    "torchrun": ("torchrun_ranks.torchrun_ranks", {"count": 20}),
    "torchrun_combined": ("torchrun_ranks.torchrun_ranks", {"count": 20, "combined": True}),
    "torchrun_offloaded": ("torchrun_ranks.torchrun_ranks", {"count": 20, "combined": True, "offloaded": True}),
    "compare": ("killed_compare.killed_compare", {"count": 20}),
    "signals": ("struck_runs.strikes", {"count": 20, "signals": ASK}),
    "lora": ("struck_runs.strikes", {"count": 20, "signals": KILL, "adapters": True}),
    "view": ("viewed_runs.viewed_runs", {"cases": 10_000}),
    "configs": ("mutated_input.configurations", {"cases": 10_000}),
    "rows": ("mutated_input.rows", {"cases": 10_000}),
}


def run_here(name: str, directory: Path, count: int | None) -> None:
    """Run one trial in this process, from where its ledger ends."""
    from soak.ledger import Ledger

    place, options = TRIALS[name]
    module, function = place.split(".")
    sized = {} if count is None else {next(iter(options)): count}
    getattr(import_module(f"soak.{module}"), function)(Ledger(directory / name), **{**options, **sized})


def main() -> int:
    from soak.schedule import schedule

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="all of them if none is named")
    parser.add_argument("--dir", type=Path, default=Path("build/soak"), help="where trials keep their ledgers and runs")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--parallel", type=int, default=1, help="trials at once")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--count", type=int, help="of kills, cases or steps, in place of a trial's own")
    parser.add_argument("--here", action="store_true", help="run one trial in this process")
    options = parser.parse_args()
    if unknown := set(options.trials) - set(TRIALS):
        parser.error(f"there is no trial {', '.join(sorted(unknown))}; there are {', '.join(TRIALS)}")
    directory = options.dir.resolve()
    if options.here:
        run_here(*options.trials, directory, options.count)
        return 0
    names = [name for name in TRIALS if not options.trials or name in options.trials]
    seconds = None if options.minutes is None else 60 * options.minutes
    return schedule(names, directory, options.parallel, seconds, options.count, options.out)


if __name__ == "__main__":
    sys.exit(main())
