"""A run that repeatedly gets a signal ends bitwise equal to an undisturbed run and leaves no processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from interruptions import MOMENTS, strike
from run_helpers import ADAPTERS, finish, get_run_dir, same_end, train_arguments

from soak.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
STEPS_PER_STRIKE = 3
GRACE = 10.0  # seconds until the processes of a killed run must have ended
MARK = "MTRL_SOAK"  # environment variable that marks all processes of a run


def strikes(ledger: Ledger, count: int, signals: Sequence[signal.Signals], adapters: bool = False) -> None:
    """`count` strikes in all, by each of the signals in turn; then the comparison."""
    tmp = ledger.directory / "tmp"
    tmp.mkdir(exist_ok=True)
    torch_cache = {"TORCHINDUCTOR_CACHE_DIR": str(ledger.directory / "torch")}  # meant to stay: not a leftover
    os.environ |= {"TMPDIR": str(tmp), MARK: str(ledger.directory), **torch_cache}
    steps = STEPS_PER_STRIKE * count
    settings = [
        f"training.max_steps={steps}", "training.save_freq=1", f"training.val_freq={STEPS_PER_STRIKE}",
        "training.save_limit=2", "worker.reward.num_cpus=2", "worker.reward.weights=[1.0,0.2,0.1]",
        f"worker.reward.functions=[accuracy,format,{ROOT}/examples/rewards/look_at_image.py]",
        *([*ADAPTERS, "worker.actor.model.lora_dropout=0.1"] if adapters else []),
    ]  # fmt: skip
    whole, struck = ledger.directory / "whole", ledger.directory / "struck"
    if not ledger.get("undisturbed"):
        shutil.rmtree(whole, ignore_errors=True)  # of a soak that was stopped, which disturbed it
        completed(train_arguments(whole, *settings))
        ledger.record(undisturbed=steps)
    command = train_arguments(struck, *settings)
    for number in range(ledger.get("strikes"), count):
        by, moment = signals[number % len(signals)], MOMENTS[number // len(signals) % len(MOMENTS)]
        status, said = strike(command, get_run_dir(struck), moment, by, random.Random(number))
        assert status in (-by, 128 + by), f"strike {number}, {by.name} at {moment}:\n{said}"
        assert "Traceback" not in said, said
        assert not left_behind(), f"strike {number}, {by.name} at {moment}: {left_behind()} still run"
        ledger.record(strikes=number + 1, **{f"{by.name} at {moment}": ledger.get(f"{by.name} at {moment}") + 1})
        print(f"{ledger.directory.name}: {number + 1} of {count}", flush=True)
    completed(command)
    same_end(get_run_dir(whole), get_run_dir(struck), steps)
    assert not (files := [path.name for path in tmp.iterdir()]), f"left in the temporary folder: {files}"
    ledger.record(passed=True)


def completed(command: list[str]) -> None:
    status, said = finish(command)
    assert status == 0, said


def left_behind(grace: float | None = None) -> list[str]:
    """Command lines of other processes with the mark, after a grace period."""
    deadline = time.monotonic() + (GRACE if grace is None else grace)
    while (found := marked()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def marked() -> list[str]:
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (OSError, ProcessLookupError):
            continue  # it has just ended
    return found
