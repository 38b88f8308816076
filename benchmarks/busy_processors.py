"""How much a training step slows down when other programs compute on the same processors.

    python -m benchmarks.busy_processors [--competitors 2] [--steps 16] [--out FILE]

Runs `benchmarks.step --size tiny` on two processors once for each way of waiting. The competitors, endless loops, start
after the first half of the steps: a run chooses its number of threads at the start, and this measures what happens
later. The result has the median step before and after that moment, their ratio, and whether all runs with two threads
computed the same losses and gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.environment import finish
from mtrl.cli import SPINS, WAITING

STEP = re.compile(r"step \d+: wall ([\d.]+)")
WAYS: dict[str, dict[str, str]] = {
    "libgomp's default": {"OMP_NUM_THREADS": "2"},
    "as mtrl train": {"OMP_NUM_THREADS": "2", WAITING[0]: SPINS},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(way: dict[str, str], steps: int, competitors: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.step", "--size", "tiny", "--steps", str(steps)]
    lines: list[str] = []
    walls: list[float] = []
    with ExitStack() as stack:
        environment = os.environ | way | {"PYTHONUNBUFFERED": "1"}
        run = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if found := STEP.match(line):
                walls.append(float(found[1]))
                if len(walls) == steps // 2:
                    for _ in range(competitors):
                        stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
    if run.returncode:
        raise SystemExit(f"benchmarks.step ended with status {run.returncode}")
    numbers = [[row["loss"], row["grad_norm"]] for row in json.loads(lines[-1])["steps"]]
    quiet, busy = statistics.median(walls[1 : steps // 2]), statistics.median(walls[steps // 2 :])
    return {"quiet": quiet, "busy": busy, "ratio": round(busy / quiet, 2), "steps": walls, "numbers": numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--competitors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    a = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    results = {}
    for name, way in WAYS.items():
        results[name] = measure(way, a.steps, a.competitors)
        print(f"{name}: {results[name]}", flush=True)
    numbers = {name: result.pop("numbers") for name, result in results.items()}
    finish(
        {
            "bench": "busy_processors",
            "args": vars(a) | {"out": None},
            "ways": results,
            "same_numbers": numbers["libgomp's default"] == numbers["as mtrl train"],
        },
        a.out,
    )


if __name__ == "__main__":
    main()
