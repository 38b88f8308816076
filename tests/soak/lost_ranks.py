"""A run on two Ray ranks that repeatedly loses a process ends bitwise equal to an undisturbed run and leaves no
processes. The run restarts its ranks by itself; the driver is killed as well and restarted by the same command."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers import is_alive
from run_helpers import COMBINED, check_combined, get_run_dir, same_end, train_arguments

from soak.ledger import Ledger
from soak.struck_runs import MARK, left_behind

RANKS = 2
MOMENTS = ("start", "step", "save")
LONGEST_WAIT = {"start": 5.0, "step": 0.5, "save": 0.05}  # seconds after the moment, drawn at random
GRACE = 90.0  # seconds until Ray's processes must have ended; its agents try for 60 to report the end
PATIENCE = 3600.0  # seconds without the moment: then something hangs
NO_RAY = "Ray does not start on this machine"


def lost_ranks(ledger: Ledger, count: int, drivers: int = 1, combined: bool = False) -> None:
    """Kills a rank `count` times at start-up, within a step and during the writing of a checkpoint, and the driver
    `drivers` times within a step; then compares. `combined`: with critic, adapters and replay."""
    os.environ |= {MARK: str(ledger.directory), "OMP_NUM_THREADS": "1"}
    steps = 2 * (count + drivers) + 2  # no kill waits for more than two
    settings = [
        f"training.max_steps={steps}", "training.save_freq=1", "training.save_limit=2", "training.val_freq=-1",
        "training.val_before_train=false", f"training.n_gpus_per_node={RANKS}", f"training.max_restarts={count}",
        *(COMBINED if combined else ()),
    ]  # fmt: skip
    whole, struck = ledger.directory / "whole", ledger.directory / "struck"
    if not ledger.get("undisturbed"):
        shutil.rmtree(whole, ignore_errors=True)  # of a soak that was stopped, which disturbed it
        Driven(whole, settings).completed()
        ledger.record(undisturbed=steps)
    run = Driven(struck, settings)
    try:
        for number in range(ledger.get("ranks killed"), count):
            moment, dice = MOMENTS[number % len(MOMENTS)], random.Random(number)
            run.lose(dice.randrange(RANKS), moment, dice)
            ledger.record(**{"ranks killed": number + 1, f"at {moment}": ledger.get(f"at {moment}") + 1})
            print(f"{ledger.directory.name}: {number + 1} of {count}", flush=True)
        for number in range(ledger.get("drivers killed"), drivers):
            run.end_driver(random.Random(number))
            ledger.record(**{"drivers killed": number + 1})
            run = Driven(struck, settings)
        run.completed()
    finally:
        run.process.kill()
    same_end(get_run_dir(whole), get_run_dir(struck), steps)
    if combined:
        check_combined(get_run_dir(struck), steps)
    ledger.record(passed=True)


class Driven:
    """`mtrl train` on ranks in a separate process, with the logs of its ranks."""

    def __init__(self, output: Path, settings: list[str]) -> None:
        self.run = get_run_dir(output)
        self.command = [sys.executable, "-m", "mtrl", *train_arguments(output, *settings)]
        self.told, self.gone = output / "said.txt", self.ranks_so_far()
        self.retried: set[int] = set()  # losses after which Ray was too slow to start
        self.told.unlink(missing_ok=True)
        self.process = self.started()

    def started(self) -> subprocess.Popen[bytes]:
        with self.told.open("a") as said:
            return subprocess.Popen(self.command, stdout=said, stderr=subprocess.STDOUT)

    def status(self) -> int | None:
        """Its exit status, once it has ended. That a machine is too busy for Ray is no fault of the run's: the same
        command starts it again, once for each loss."""
        status = self.process.poll()
        if status and NO_RAY in self.said() and self.losses() not in self.retried:
            self.retried.add(self.losses())
            self.process = self.started()
            return None
        return status

    def completed(self) -> None:
        while (status := self.status()) is None:
            time.sleep(0.5)
        assert status == 0, self.said()
        assert not (left := left_behind(GRACE)), f"{left} still run"

    def lose(self, rank: int, moment: str, dice: random.Random) -> None:
        """Kills a rank, and waits until the run has reported it and is about to resume."""
        pid, losses = self.await_moment(rank, moment, dice), self.losses()
        os.kill(pid, signal.SIGKILL)
        self.await_that(lambda: self.losses() > losses, f"word of the loss of rank {rank} ({pid}) at {moment}")
        assert self.losses() == losses + 1 and f"rank {rank} of {RANKS}" in self.said(), self.said()
        self.gone |= self.ranks_so_far()
        ended = lambda: not any(map(is_alive, self.gone))  # noqa: E731
        self.await_that(ended, "end of the ranks that were left alone")

    def end_driver(self, dice: random.Random) -> None:
        """Kills the driver, and waits until all its processes have ended."""
        self.await_moment(0, "step", dice)
        self.process.kill()
        self.process.wait()
        assert not (left := left_behind(GRACE)), f"{left} outlive their driver"

    def await_moment(self, rank: int, moment: str, dice: random.Random) -> int:
        """The pid of a rank that has just reached its moment."""
        updates, wait = dice.randint(1, 2), dice.uniform(0.0, LONGEST_WAIT[moment])
        has_come = {
            "start": lambda: True,
            "step": lambda: self.updates(rank) >= updates,
            "save": lambda: self.updates(rank) >= 1 and any((self.run / "checkpoints").glob(".step_*")),
        }[moment]
        self.await_that(lambda: self.now(rank) is not None and has_come(), f"moment ({moment})")
        time.sleep(wait)
        pid = self.now(rank)
        assert pid is not None and is_alive(pid), f"the rank ended before its moment ({moment}):\n{self.said()}"
        return pid

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not condition():
            assert self.status() is None, f"the run ended before the {what}:\n{self.said()}"
            assert time.monotonic() - began < PATIENCE, f"no {what} within {PATIENCE:.0f} s:\n{self.said()}"
            time.sleep(0.005)

    # ------------------------------------------------------------------------------------------------ what can be read
    def now(self, rank: int) -> int | None:
        """The process of a rank, once the newest attempt has one."""
        pids = pids_in(self.log(rank))
        return pids[-1] if pids and pids[-1] not in self.gone else None

    def updates(self, rank: int) -> int:
        """Those that its newest process has begun."""
        return self.log(rank).rpartition("process ")[2].count("actor.update begins")

    def ranks_so_far(self) -> set[int]:
        return {pid for rank in range(RANKS) for pid in pids_in(self.log(rank))}

    def losses(self) -> int:
        return self.said().count("resumes from its last checkpoint")

    def log(self, rank: int) -> str:
        return read(self.run / "logs" / f"rank_{rank}.log")

    def said(self) -> str:
        return read(self.told)


def pids_in(log: str) -> list[int]:
    return [int(found) for found in re.findall(r"process (\d+) on", log)]


def read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
