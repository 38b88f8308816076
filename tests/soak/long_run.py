"""A thousand steps of the embedded model with everything on: does anything grow?"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

from run_helpers import get_run_dir, train_arguments

from soak.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
SETTLED, WINDOW = 50, 25  # after the first checkpoints and validations have allocated their memory
EVERYTHING = [
    "training.save_freq=25", "training.val_freq=25", "training.save_limit=2", "training.val_generations_to_log=3",
    "training.logger=[console]", "worker.actor.ppo_epochs=2", "worker.reward.num_cpus=2",
    "optimization.enable_perception_filtering=true", "optimization.enable_trajectory_reweighting=true",
    "optimization.enable_entropy_filtering=true", "optimization.enable_token_weights=true",
    "optimization.compute_attention_metrics=true", "optimization.credit=[entropy_change]",
    "optimization.disable_divergence=false", "optimization.use_divergence_loss=true",
    "optimization.divergence_penalty=low_var_kl", "optimization.divergence_type=adaptive",
    f"worker.reward.functions=[accuracy,format,length,mdi,vgr,{ROOT}/examples/rewards/look_at_image.py]",
    "worker.reward.weights=null",
]  # fmt: skip


def long_run(ledger: Ledger, steps: int, most: float) -> None:
    """Runs one process to the last step and measures it from outside after each step. `most`: the share by which its
    memory may grow; with few steps, the allocator's fluctuation is a larger part of it."""
    output = ledger.directory / "run"
    shutil.rmtree(
        output, ignore_errors=True
    )  # the memory of one process is measured, so the run cannot resume in another
    command = [sys.executable, "-m", "mtrl", *train_arguments(output, f"training.max_steps={steps}", *EVERYTHING)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (ledger.directory / "run.txt").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=DEVNULL, stderr=said)
        seen = watched(process, get_run_dir(output) / "metrics.jsonl")
    assert process.returncode == 0, (ledger.directory / "run.txt").read_text()[-3000:]
    early, late = (window(seen, first) for first in (SETTLED, steps - WINDOW))
    growth = late[0] / early[0] - 1
    found = {"steps": steps, "memory_mib": [round(at[0] / 1024) for at in (early, late)], "growth": round(growth, 4)}
    ledger.record(**found, files=[early[1], late[1]], threads=[early[2], late[2]])
    assert growth < most and early[1:] == late[1:], ledger.counts
    ledger.record(passed=True)


def watched(process: subprocess.Popen, metrics: Path) -> dict[int, tuple[int, int, int]]:
    """Resident kB, open files and threads by step, measured when the step's row of metrics appears."""
    seen: dict[int, tuple[int, int, int]] = {}
    while process.poll() is None:
        step = metrics.read_bytes().count(b'"actor/pg_loss"') if metrics.exists() else 0
        if step and step not in seen:
            try:
                seen[step] = resources(process.pid)
            except (FileNotFoundError, KeyError):
                break  # it has just ended
            if step % 50 == 0:
                print(f"long: step {step}, {seen[step][0] / 1024:.0f} MiB", flush=True)
        time.sleep(0.05)
    process.wait()
    return seen


def resources(pid: int) -> tuple[int, int, int]:
    """Resident kB, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def window(seen: dict[int, tuple[int, int, int]], first: int) -> tuple[float, float, float]:
    """Medians over the steps from `first` on."""
    found = [values for step, values in seen.items() if first <= step < first + WINDOW]
    assert len(found) > WINDOW // 2, f"only {len(found)} of {WINDOW} steps were seen"
    return tuple(statistics.median(column) for column in zip(*found, strict=True))  # type: ignore[return-value]
