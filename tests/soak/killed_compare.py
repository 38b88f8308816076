"""`mtrl compare` that is killed repeatedly, or loses a process that it has started, ends with the results of an
undisturbed one. Its runs save and stop; started again at once, it waits for them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from interruptions import rows_logged
from run_helpers import TINY, outputs, same_end

from soak.ledger import Ledger
from soak.struck_runs import MARK, left_behind

ARMS, SEEDS = ("grpo", "tprl_filtering"), 2
VICTIMS = ("compare", "child")
MOMENTS = ("start", "step", "save")
LONGEST_WAIT = {"start": 12.0, "step": 0.5, "save": 0.03}  # seconds after the moment, drawn at random
GRACE = 120.0  # seconds until runs whose comparison was killed have saved and ended
PATIENCE = 900.0  # seconds without the moment: then something hangs


def killed_compare(ledger: Ledger, count: int) -> None:
    """`count` kills of the comparison and of processes that it has started, in turn; then the comparison of both."""
    os.environ |= {MARK: str(ledger.directory), "OMP_NUM_THREADS": "1"}
    steps = 2 * count + 2  # four runs: no kill waits for more than eight steps of them all
    whole, struck = (Compared(ledger.directory / name, steps) for name in ("whole", "struck"))
    if not ledger.get("undisturbed"):
        shutil.rmtree(whole.out, ignore_errors=True)  # of a soak that was stopped, which disturbed it
        whole.complete()
        ledger.record(undisturbed=steps * len(ARMS) * SEEDS)
    for number in range(ledger.get("killed"), count):
        victim, moment = VICTIMS[number % 2], MOMENTS[number // 2 % 3]
        struck.lose(victim, moment, random.Random(number))
        if number % 4 < 2:  # else the next one is started at once
            assert not (left := left_behind(GRACE)), f"kill {number} of {victim} at {moment}: {left} still run"
        name = f"{victim} at {moment}"
        ledger.record(**{"killed": number + 1, name: ledger.get(name) + 1})
        print(f"compare: {number + 1} of {count}", flush=True)
    struck.complete()
    assert not (left := left_behind(GRACE)), f"{left} still run"
    assert struck.verdicts() == whole.verdicts()
    for run in whole.runs():
        same_end(whole.out / run, struck.out / run, steps)
    ledger.record(passed=True)


class Compared:
    """`mtrl compare` in a separate process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.out, self.output = folder / "out", folder / "said.txt"
        settings = [
            *TINY, outputs(folder)[1], f"training.max_steps={steps}", "training.save_freq=1", "training.save_limit=2",
            f"training.val_freq={steps // 2}",
        ]  # fmt: skip
        arms = [f"mtrl:zoo/{name}" for name in ARMS]
        words = [*arms, "--seeds", str(SEEDS), "--jobs", "2", "--out", str(self.out), *settings]
        self.command = [sys.executable, "-m", "mtrl", "compare", *words]

    def complete(self) -> None:
        process = self.started()
        assert process.wait() == 0 and "failed  " not in self.said(), self.said()

    def lose(self, victim: str, moment: str, dice: random.Random) -> None:
        """Starts it, and kills it or one of its processes at the moment. A comparison whose run was killed reports it,
        and is then stopped by Ctrl-C."""
        rows, wait = self.rows() + dice.randint(1, 3), dice.uniform(0.0, LONGEST_WAIT[moment])
        process = self.started()
        has_come: dict[str, Callable[[], bool]] = {
            "start": lambda: victim == "compare" or bool(children(process.pid)),
            "step": lambda: self.rows() >= rows,
            "save": lambda: self.rows() >= rows and any(self.out.glob("*/*/checkpoints/.step_*")),
        }
        try:
            self.await_that(has_come[moment], process, moment)
            time.sleep(wait)
            if victim == "compare":
                assert process.poll() is None, f"it ended before its moment ({moment}):\n{self.said()}"
                assert "failed  " not in self.said(), self.said()
                process.kill()
            else:
                self.kill_child(process, dice)
            process.wait(PATIENCE)
        finally:
            process.kill()
        assert "Traceback" not in self.said() and self.said().count("failed   ") <= 1, self.said()

    def kill_child(self, process: subprocess.Popen[bytes], dice: random.Random) -> None:
        self.await_that(lambda: bool(children(process.pid)), process, "process")
        os.kill(dice.choice(children(process.pid)), signal.SIGKILL)
        reported = lambda: "(status -9)" in self.said() or "cannot start" in self.said()  # noqa: E731
        while process.poll() is None and not reported():
            time.sleep(0.05)
        assert reported(), self.said()
        process.send_signal(signal.SIGINT)

    def await_that(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
        began = time.monotonic()
        while not condition():
            assert process.poll() is None, f"it ended before the {what}:\n{self.said()}"
            assert time.monotonic() - began < PATIENCE, f"no {what} within {PATIENCE:.0f} s:\n{self.said()}"
            time.sleep(0.005)

    def started(self) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            return subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def runs(self) -> list[str]:
        return [f"{arm}/seed_{seed}" for arm in ARMS for seed in range(SEEDS)]

    def rows(self) -> int:
        return sum(rows_logged(self.out / run) for run in self.runs())

    def verdicts(self) -> str:
        """Everything in the report except times, and what the rules do to the gradient."""
        report = json.loads((self.out / "comparison.json").read_text())
        for arm in report["arms"]:
            del arm["seconds_step"]
        effects = [json.loads((self.out / arm / "manipulation.json").read_text())["effect"] for arm in ARMS]
        return json.dumps([report, effects])  # as text, in which NaN equals NaN


def children(pid: int) -> list[int]:
    """The runs and checks that a process has started, in any of its threads."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += [int(each) for each in file.read_text().split()]
    return found
