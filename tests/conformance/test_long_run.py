"""A long run does not grow: memory, open files, threads, seen from outside, with saves and validations on the way."""

import os
import statistics
import time
from pathlib import Path

import pytest
from run_helpers import run_of, start, train_arguments

STEPS, SETTLED, WINDOW = 300, 50, 10


def resources(pid: int) -> tuple[int, int, int]:
    """Resident kB, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


@pytest.mark.slow
def test_nothing_grows(tmp_path):
    """Each step leaves one row of metrics; the process is looked at when the row has come."""
    settings = [f"training.max_steps={STEPS}", "training.save_freq=25", "training.val_freq=25", "training.save_limit=2"]
    process = start(train_arguments(tmp_path, *settings))
    metrics, seen = run_of(tmp_path) / "metrics.jsonl", {}
    while process.poll() is None:
        step = metrics.read_bytes().count(b'"actor/pg_loss"') if metrics.exists() else 0
        if step and step not in seen:
            try:
                seen[step] = resources(process.pid)
            except (FileNotFoundError, KeyError):
                break  # it has just ended
        time.sleep(0.01)
    said = process.communicate()[1]
    assert process.returncode == 0, said

    def around(step: int) -> list[tuple[int, int, int]]:
        return [values for at, values in seen.items() if step <= at < step + WINDOW]

    early, late = around(SETTLED), around(STEPS - WINDOW)
    assert len(early) > WINDOW // 2 and len(late) > WINDOW // 2
    memory = [statistics.median(values[0] for values in window) for window in (early, late)]
    files, threads = ([statistics.median(values[i] for values in window) for window in (early, late)] for i in (1, 2))
    told = f"memory {memory} kB, files {files}, threads {threads}"
    print(told)
    assert memory[1] < 1.03 * memory[0], told
    assert files[0] == files[1] and threads[0] == threads[1], told
