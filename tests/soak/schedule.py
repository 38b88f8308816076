"""Runs trials side by side, each in a process of its own, for as long as the time allows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrl.bench.environment import environment
from soak.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"ranks": "ray", "ranks_combined": "ray", "compare": "scipy", "view": "uvicorn", "lora": "peft"}
NEEDS |= {"torchrun_combined": "peft", "torchrun_offloaded": "peft"}
LAST_LINES = 30  # of a failed trial


def schedule(
    names: Sequence[str], directory: Path, at_once: int, seconds: float | None, count: int | None, out: Path | None
) -> int:
    """Run the trials that have not passed; returns the exit status."""
    began = time.monotonic()
    places = [str(ROOT), *(str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(":") if each)]
    os.environ |= {"PYTHONPATH": ":".join(places)}  # for processes that are started in another folder, too
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # runs are compared bitwise
    missing = {name: NEEDS[name] for name in names if name in NEEDS and find_spec(NEEDS[name]) is None}
    waiting = [name for name in names if name not in missing and not Ledger(directory / name).get("passed")]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    try:
        while (waiting or running) and (seconds is None or time.monotonic() - began < seconds):
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = start(name, directory, count)
                print(f"started  {name}", flush=True)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                trial = running.pop(name)
                stop(trial)  # what a failed one has left
                if trial.returncode:
                    failed.append(name)
                    report_failure(name, directory)
                else:
                    print(f"passed   {name} {json.dumps(Ledger(directory / name).counts)}", flush=True)
            time.sleep(0.2)
    finally:
        for trial in running.values():
            stop(trial)
    for name in (left := [*running, *waiting]):
        print(f"left     {name} {json.dumps(Ledger(directory / name).counts)}")
    if left:
        print(f"{len(left)} of {len(names)} trials are left; the same command continues")
    for name, package in missing.items():
        print(f"skipped  {name}: {package} is not installed")
    if out is not None:
        write_results(out, {name: result_of(name, directory, missing) for name in names}, at_once)
    return 1 if failed else 0


def start(name: str, directory: Path, count: int | None) -> subprocess.Popen[bytes]:
    """Start a trial as the leader of a process group."""
    command = [sys.executable, str(ROOT / "tests" / "soak"), name, "--here", "--dir", str(directory)]
    command += [] if count is None else ["--count", str(count)]
    with said(name, directory).open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def stop(trial: subprocess.Popen[bytes]) -> None:
    """Kill a trial and the runs that it has started. They resume, so this may happen at any moment."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(trial.pid, signal.SIGKILL)
    trial.wait()


def report_failure(name: str, directory: Path) -> None:
    """The ledger keeps failures: a trial that passes when it is repeated has failed nevertheless."""
    lines = said(name, directory).read_text(errors="replace").splitlines()
    ledger = Ledger(directory / name)
    ledger.record(failures=[*ledger.get("failures", []), lines[-1][:500] if lines else ""])
    print("\n".join([f"failed   {name}", *lines[-LAST_LINES:]]), file=sys.stderr, flush=True)


def said(name: str, directory: Path) -> Path:
    file = directory / name / "said.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def result_of(name: str, directory: Path, missing: dict[str, str]) -> dict[str, Any]:
    return {"skipped": f"{missing[name]} is not installed"} if name in missing else Ledger(directory / name).counts


def write_results(out: Path, trials: dict[str, dict[str, Any]], at_once: int) -> None:
    command = f"python tests/soak --parallel {at_once}, one thread per process, no GPU"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command, "trials": trials, **environment()}, indent=1) + "\n")
