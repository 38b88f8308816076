"""Runs configurations over seeds, several at once, each as `mtrl train` of its own process.

    OUT/ARM/seed_S/      the run's directory
    OUT/ARM/seed_S.log   what it printed
    OUT/ARM/seed_S.done  it went through to its last step

The seed is that of the prompts and perturbations and that of sampling, so that runs of one seed see the same prompts
and, in their first step, the same responses. Whatever ends a batch, the same command goes on: what is done is left
alone, and what was begun goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mtrl.utils.errors import StartError

CHECK = "manipulation.json"
POLL_S = 0.2
LAST_LINES = 5


@dataclass(frozen=True)
class SeedJob:
    arm: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    out: Path

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def directory(self) -> Path:
        return self.out / self.arm / f"seed_{self.seed}"

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def done(self) -> Path:
        return self.directory.with_suffix(".done")

    def command(self) -> list[str]:
        keys = {
            "dataset.seed": self.seed, "worker.rollout.seed": self.seed, "training.output_dir": self.out,
            "training.project_name": self.arm, "training.experiment_name": f"seed_{self.seed}",
        }  # fmt: skip
        words = [f"{key}={value}" for key, value in keys.items()]
        return [sys.executable, "-m", "mtrl", "train", self.config, *self.overrides, *words]


def plan_jobs(arms: Mapping[str, str], seeds: Sequence[int], overrides: Sequence[str], out: Path) -> list[SeedJob]:
    """Seed by seed, so that a batch that is cut short has whole pairs."""
    return [SeedJob(arm, seed, file, tuple(overrides), out) for seed in seeds for arm, file in arms.items()]


def check_arms(jobs: Sequence[SeedJob], at_once: int) -> dict[str, dict[str, float]]:
    """What the rules of each arm do to a gradient, before any of them is trained."""
    first = [job for job in jobs if job.seed == jobs[0].seed]
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda job: check_arm(job, thread_share(at_once)), first)
        return {job.arm: check for job, check in zip(first, found, strict=True)}


def thread_share(at_once: int) -> dict[str, str]:
    """The environment of one of several runs: its share of the cores, not all of them for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {"OMP_NUM_THREADS": str(max(1, cores // at_once))} if at_once > 1 else {}
    return shared | os.environ


def check_arm(job: SeedJob, environment: Mapping[str, str]) -> dict[str, float]:
    """What the rules of an arm do to the gradient of its first step; measured once, and kept beside its runs."""
    file = job.directory.parent / CHECK
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        words = [*job.overrides, f"dataset.seed={job.seed}", f"worker.rollout.seed={job.seed}"]
        command = [sys.executable, "-m", "mtrl.commands.gradient_check", job.config, *words]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise StartError(f"{job.arm} cannot begin: {' '.join(done.stderr.strip().splitlines()[-LAST_LINES:])}")
        file.write_text(done.stdout.strip().splitlines()[-1] + "\n")
    found: dict[str, float] = json.loads(file.read_text())
    return found


def run_batch(
    jobs: Sequence[SeedJob], at_once: int, seconds: float | None, say: Callable[[str], None]
) -> tuple[int, int]:
    """Runs what is not done yet; how many failed, and how many are left when the time is up."""
    waiting = [job for job in jobs if not job.done.exists()]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    end = float("inf") if seconds is None else time.monotonic() + seconds
    running: dict[SeedJob, subprocess.Popen[bytes]] = {}
    failed = 0
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = start(job, thread_share(at_once))
                say(f"started  {job.name}")
            for job in [job for job, process in running.items() if process.poll() is not None]:
                status = running.pop(job).returncode
                failed += status != 0
                last_lines(job, status, say)
            time.sleep(POLL_S)
    finally:
        stop(running)
    return failed, len(running) + len(waiting)


def last_lines(job: SeedJob, status: int, say: Callable[[str], None]) -> None:
    if status:
        say(f"failed   {job.name} (status {status}); {job.log} ends with\n{tail(job.log)}")
    else:
        job.done.touch()
        say(f"finished {job.name}")


def start(job: SeedJob, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def stop(running: Mapping[SeedJob, subprocess.Popen[bytes]]) -> None:
    """A run that is asked to stop finishes its step, saves and ends."""
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in running.values():
        process.wait()


def tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])


def pack(out: Path, archive: Path, jobs: Sequence[SeedJob]) -> None:
    """All of a batch in one file. Of a run that is done its numbers are kept and its checkpoints are not."""
    finished = {f"{job.arm}/seed_{job.seed}/checkpoints" for job in jobs if job.done.exists()}

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.removeprefix(f"{out.name}/") in finished else entry

    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(out, out.name, filter=kept)
    part.replace(archive)


def unpack(archive: Path, out: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(out.parent, filter="data")
