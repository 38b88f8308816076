"""Trials that take hours: `make soak`, or some of them: `python tests/soak kills ranks --count 20 --out DIR`.

kills     50 x SIGKILL at start-up, in a step and while saving; every one resumed bitwise, no orphan, no leftovers
signals   20 x SIGTERM and SIGINT, the same
configs   10,000 mutated configurations: no traceback, no hang
rows      10,000 mutated rows and images: the same, and every row accounted for
ranks     20 x SIGKILL of a rank of two, once of their driver: the run resumes by itself, bitwise, no orphan
torchrun  20 x SIGKILL of a rank of two without Ray, the first or the second, the same
long      1,000 steps with everything on: memory, files and threads do not grow

Each trial keeps a ledger in DIR/<trial>: a stopped soak continues where it was, and a passed one is not repeated. Exit
status 1: a trial failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak.ledger import Ledger
from soak.long_run import long_run
from soak.lost_ranks import lost_ranks
from soak.mutated_input import configurations, rows
from soak.struck_runs import strikes
from soak.torchrun_ranks import torchrun_ranks

TRIALS: dict[str, partial[None]] = {
    "kills": partial(strikes, count=50, signals=[signal.SIGKILL]),
    "signals": partial(strikes, count=20, signals=[signal.SIGTERM, signal.SIGINT]),
    "ranks": partial(lost_ranks, count=20),
    "torchrun": partial(torchrun_ranks, count=20),
    "configs": partial(configurations, cases=10_000),
    "rows": partial(rows, cases=10_000),
    "long": partial(long_run, steps=1000, most=0.02),
}


def counted(trial: partial[None], count: int | None) -> dict[str, int]:
    """The argument for the number of repetitions, under the trial's name for it."""
    name = next(name for name in ("count", "cases", "steps") if name in trial.keywords)
    return {} if count is None else {name: count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="trial", help="all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    parser.add_argument("--count", type=int, help="of strikes, cases or steps, in place of a trial's own")
    options = parser.parse_args()
    if unknown := set(options.trials) - set(TRIALS):
        parser.error(f"there is no trial {', '.join(sorted(unknown))}; there are {', '.join(TRIALS)}")
    failed = []
    for name in options.trials or TRIALS:
        ledger = Ledger(options.out.resolve() / name)
        if not ledger.get("passed"):
            try:
                TRIALS[name](ledger, **counted(TRIALS[name], options.count))
            except Exception:
                traceback.print_exc()
                failed.append(name)
        print(name, json.dumps(ledger.counts), flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
