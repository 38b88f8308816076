"""Runs configurations over seeds, several in parallel, each as its own `mtrl train` process.

    OUT/ARM/seed_S/      the run's directory
    OUT/ARM/seed_S.log   its output
    OUT/ARM/arm.yaml     the resolved configuration that all its runs read
    OUT/ARM/seed_S.done  exists once the run has finished its last step: what its results depend on, as JSON

The seed applies to prompts, perturbations and sampling, so that runs of one seed see the same prompts and, in their
first step, the same responses. The same command resumes an interrupted batch: finished runs are left alone, and
unfinished ones resume from their checkpoints. A result of another configuration, code or data is an error.
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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mtrl.utils.errors import StartError
from mtrl.utils.files import is_locked, write_file
from mtrl.utils.machine import STOPS_WITH

EFFECTS_FILE = "manipulation.json"
LOCK = "run.lock"  # checkpoint/run_directory.py writes it
POLL_S = 0.2
LAST_LINES = 5
# Nobody writes into this pipe: its readers continue when its only writer, this process, has ended.
LIFELINE = cache(os.pipe)
MAX_CHANGES = 8  # shown of a result of other settings


@dataclass(frozen=True)
class SeedJob:
    arm: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    out: Path
    origin: Mapping[str, str] = field(default_factory=dict, hash=False)  # what its results depend on

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
        overrides = [*self.overrides, *(f"{key}={value}" for key, value in keys.items())]
        return [sys.executable, "-m", "mtrl", "train", self.config, *overrides]

    def is_in_use(self) -> bool:
        """Whether a process still works in the run's directory. Runs of a killed batch finish their step and save."""
        return is_locked(self.directory / LOCK)

    def is_done(self) -> bool:
        """Whether the run has finished; StartError if with other settings."""
        if not self.done.is_file():
            return False
        check_same_origin(read_object(self.done).get("origin"), self.origin, self.directory)
        return True


def plan_jobs(
    arms: Mapping[str, str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    out: Path,
    origins: Mapping[str, Mapping[str, str]] | None = None,
) -> list[SeedJob]:
    """Order the runs by seed: an interrupted batch then has complete pairs. `origins`: what the results of each arm
    depend on."""
    known = origins or {}
    return [
        SeedJob(arm, seed, file, tuple(overrides), out, known.get(arm, {}))
        for seed in seeds
        for arm, file in arms.items()
    ]


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none, as in files of 0.1.0."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def check_same_origin(before: Mapping[str, str] | None, now: Mapping[str, str], result: Path) -> None:
    """Raise StartError if a stored result is not that of the current configuration, code and data."""
    if before == now:
        return
    again = f"name another --out, or delete {result} to compute it again"
    if before is None:
        raise StartError(f"{result} was made by a version that did not store what it depends on; {again}")
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = [f"{name}: was {before.get(name, 'unset')}, is {now.get(name, 'unset')}" for name in names]
    shown = [
        *changes[:MAX_CHANGES],
        *([f"and {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []),
    ]
    raise StartError("\n  ".join([f"{result} is the result of other settings; {again}:", *shown]))


def measure_effects(jobs: Sequence[SeedJob], max_parallel: int) -> dict[str, dict[str, float]]:
    """What the rules of each arm do to the gradient of the first step, measured before any arm is trained."""
    first = [job for job in jobs if job.seed == jobs[0].seed]
    with ThreadPoolExecutor(max_parallel) as pool:
        effects = pool.map(lambda job: measure_effect(job, limit_threads(max_parallel)), first)
        return {job.arm: effect for job, effect in zip(first, effects, strict=True)}


def limit_threads(max_parallel: int) -> dict[str, str]:
    """The environment of one of several parallel runs, with its share of the CPU cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // max_parallel))} if max_parallel > 1 else {}
    return threads | os.environ


def measure_effect(job: SeedJob, environment: Mapping[str, str]) -> dict[str, float]:
    """Measure one arm, or read the result of an earlier measurement next to its runs."""
    file, origin = job.directory.parent / EFFECTS_FILE, {**job.origin, "seed": str(job.seed)}
    if file.is_file():
        stored = read_object(file)
        check_same_origin(stored.get("origin"), origin, file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        overrides = [*job.overrides, f"dataset.seed={job.seed}", f"worker.rollout.seed={job.seed}"]
        command = [sys.executable, "-m", "mtrl.commands.gradient_check", job.config, *overrides]
        done = subprocess.run(command, capture_output=True, text=True, **stopping_with_us(environment))
        if done.returncode:
            raise StartError(f"{job.arm} cannot start: {' '.join(done.stderr.strip().splitlines()[-LAST_LINES:])}")
        stored = {"origin": origin, "effect": json.loads(done.stdout.strip().splitlines()[-1])}
        write_file(file, json.dumps(stored))
    effect: dict[str, float] = stored["effect"]
    return effect


def run_batch(
    jobs: Sequence[SeedJob], max_parallel: int, seconds: float | None, log: Callable[[str], None]
) -> tuple[int, int]:
    """Run all jobs that are not done; returns how many failed and how many are left when the time is up."""
    waiting = [job for job in jobs if not job.is_done()]
    if len(waiting) < len(jobs):
        log(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    for job in waiting:
        if job.is_in_use():
            log(f"waiting  {job.name}: another process still uses {job.directory}")
    end = float("inf") if seconds is None else time.monotonic() + seconds
    running: dict[SeedJob, subprocess.Popen[bytes]] = {}
    failed = 0
    try:
        while (waiting or running) and time.monotonic() < end:
            while len(running) < max_parallel and (ready := next((j for j in waiting if not j.is_in_use()), None)):
                waiting.remove(ready)
                running[ready] = start(ready, limit_threads(max_parallel))
                log(f"started  {ready.name}")
            for job in [job for job, process in running.items() if process.poll() is not None]:
                status = running.pop(job).returncode
                failed += status != 0
                if status:
                    log(f"failed   {job.name} (status {status}); {job.log} ends with\n{last_lines(job.log)}")
                else:
                    write_file(job.done, json.dumps({"origin": job.origin}))
                    log(f"finished {job.name}")
            time.sleep(POLL_S)
    finally:
        stop(running)
    return failed, len(running) + len(waiting)


def start(job: SeedJob, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a run that saves and stops if this process ends, in whatever way."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(job.command(), stdout=log, stderr=subprocess.STDOUT, **stopping_with_us(environment))


def stopping_with_us(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that start a process which stops when this one has ended (`stop_with_parent`)."""
    lifeline, _ = LIFELINE()
    environment = {**environment, STOPS_WITH: str(lifeline)}
    return {"stdin": subprocess.DEVNULL, "env": environment, "pass_fds": (lifeline,)}


def stop(running: Mapping[SeedJob, subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, after which a run finishes its step, saves and ends."""
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in running.values():
        process.wait()


def last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])


def pack(out: Path, archive: Path, jobs: Sequence[SeedJob]) -> None:
    """Pack a batch into one file, without the checkpoints of finished runs."""
    finished = {f"{job.arm}/seed_{job.seed}/checkpoints" for job in jobs if job.done.exists()}

    def select(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.removeprefix(f"{out.name}/") in finished else entry

    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(out, out.name, filter=select)
    part.replace(archive)


def unpack(archive: Path, out: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(out.parent, filter="data")
