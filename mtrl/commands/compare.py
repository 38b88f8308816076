"""`mtrl compare`: configurations over paired seeds, or runs that are there, with intervals and tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtrl.commands.load_arguments import say, started, take_option
from mtrl.compare.arms import Arm, load_arm, read_arm
from mtrl.compare.batch import SeedJob, check_arms, pack, plan_jobs, run_batch, unpack
from mtrl.config import load_config
from mtrl.report.compare_page import NONE, Checks, check_page, write_pages
from mtrl.utils.errors import StartError

USAGE = "mtrl compare CONFIG... [--seeds N | A-B] [--jobs N] [--minutes M] [--out DIR] [--archive FILE] [a.b=c ...]"


def run(arguments: Sequence[str]) -> int:
    if find_spec("scipy") is None:
        raise StartError("mtrl compare needs scipy; pip install 'mtrl[compare]'")
    seeds, words = parse_seeds(arguments)
    at_once, words = parse_number(words, "--jobs", 1)
    minutes, words = parse_number(words, "--minutes", None)
    given, words = take_option(words, "--out", "name a directory")
    archive, words = take_option(words, "--archive", "name a file that ends in .tar.gz")
    if option := next((word for word in words if word.startswith("--")), None):
        raise StartError(f"there is no option {option}; {USAGE}")
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    places = [word for word in words if word not in overrides]
    if len(places) < 2:
        told = "two configurations or runs at least; the first is what the others are compared with"
        raise StartError(f"{told}. {USAGE}")
    if runs := [place for place in places if Path(place).is_dir()]:
        if len(runs) < len(places):
            other = next(place for place in places if place not in runs)
            raise StartError(f"{runs[0]} is a directory and {other} is none; compare runs, or configurations")
        if overrides:
            raise StartError(f"{overrides[0]}: these runs are there already; overrides are for configurations")
        return report([started(read_arm, Path(place)) for place in places], Path(given or "comparison"))
    assert at_once is not None
    jobs = plan(places, seeds, overrides, Path(given or "comparison"))
    return run_all(jobs, at_once, minutes, Path(archive) if archive else None)


def plan(files: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], out: Path) -> list[SeedJob]:
    """Whatever is wrong with a configuration is said before hours are spent on another."""
    arms = {Path(file).stem: file for file in files}
    if len(arms) < len(files):
        raise StartError("two configurations have the same name; an arm is called as its file")
    for file in files:
        load_config(file, overrides)
    return plan_jobs(arms, seeds, overrides, out)


def run_all(jobs: Sequence[SeedJob], at_once: int, minutes: int | None, archive: Path | None) -> int:
    out = jobs[0].out
    if archive is not None and archive.is_file() and not out.exists():
        unpack(archive, out)
    checks = check_arms(jobs, at_once)
    print(check_page(checks))
    failed, left = run_batch(jobs, at_once, None if minutes is None else 60.0 * minutes, say)
    arms = [load_arm(name, places) for name, places in finished(jobs).items()]
    known = [arm for arm in arms if arm is not None]
    if len(known) == len(arms):
        report(known, out, checks)
    if left:
        say(f"{left} of {len(jobs)} runs are left; the same command goes on")
    if archive is not None:
        pack(out, archive, jobs)
    return 1 if failed else 0


def finished(jobs: Sequence[SeedJob]) -> dict[str, list[Path]]:
    """The directories of runs that went through, by arm."""
    arms: dict[str, list[Path]] = {job.arm: [] for job in jobs}
    for job in jobs:
        if job.done.exists():
            arms[job.arm].append(job.directory)
    return arms


def report(arms: Sequence[Arm], out: Path, checks: Checks = NONE) -> int:
    print(started(write_pages, arms, out, checks))
    print(json.dumps({"arms": {arm.name: len(arm.runs) for arm in arms}, "report": str(out / "comparison.md")}))
    return 0


def parse_seeds(words: Sequence[str]) -> tuple[range, list[str]]:
    """The first so many, or from one to another: runs of other seeds may have been made elsewhere."""
    given, others = take_option(words, "--seeds", "give a whole number, or the first and the last seed as 5-9")
    first, dash, last = (given or "5").partition("-")
    if not dash:
        number, _ = parse_number(["--seeds", first], "--seeds", None)
        return range(number or 0), others
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise StartError(f"--seeds: {given} is no range of seeds; write the first and the last as 5-9")
    return range(int(first), int(last) + 1), others


def parse_number(words: Sequence[str], name: str, default: int | None) -> tuple[int | None, list[str]]:
    given, others = take_option(words, name, "give a whole number")
    if given is None:
        return default, others
    if not given.isdecimal() or int(given) < 1:
        raise StartError(f"{name}: {given} is no whole number from 1 on")
    return int(given), others
