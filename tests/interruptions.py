"""Sends signals to runs at chosen moments: start-up, a step, the writing of a checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path

from run_helpers import ForkedRun, start

from mtrl.checkpoint.folder_store import list_checkpoints

MOMENTS = ("start", "step", "save")
LONGEST_WAIT = {"start": 3.0, "step": 0.15, "save": 0.03}  # seconds after the moment, drawn at random
PATIENCE = 300.0  # seconds to wait for the moment; longer means a hang


def strike(
    command: list[str], run: Path, moment: str, number: int, dice: random.Random, forked: bool = False
) -> tuple[int | None, str]:
    """Start the run, wait for the moment and send the signal; returns exit status and messages of the process."""
    rows = rows_logged(run) + dice.randint(1, 2)
    wait = dice.uniform(0.0, LONGEST_WAIT[moment])
    process = ForkedRun(command) if forked else start(command)
    try:
        began = time.monotonic()
        while process.poll() is None and not has_come(moment, run, rows):
            assert time.monotonic() - began < PATIENCE, f"the moment ({moment}) never came"
            time.sleep(0.001)
        time.sleep(wait)
        process.send_signal(number)
        messages = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    return process.returncode, messages


def has_come(moment: str, run: Path, rows: int) -> bool:
    if moment == "start":
        return True
    if moment == "step":
        return rows_logged(run) >= rows
    saves = run / "checkpoints"
    return bool(list_checkpoints(saves)) and any(saves.glob(".step_*"))


def rows_logged(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
