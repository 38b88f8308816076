"""Compare configurations over the same seeds, or existing runs, with intervals and tests.

mtrl compare CONFIG CONFIG... [--seeds 5 | 5-9] [--jobs 1] [--minutes M] [--out DIR] [--archive FILE] [a.b=c ...]
mtrl compare RUN|DIR_OF_RUNS RUN|DIR_OF_RUNS... [--out DIR]

Trains every configuration with each seed, --jobs at once, into DIR/CONFIG/seed_S; the others are compared with the
first. The same command resumes an interrupted comparison. --minutes ends it in time, and --archive packs DIR into one
.tar.gz file, from which another machine can resume. Writes comparison.md, .json and .png: final accuracy and area under
the curve with intervals, paired tests with Holm's correction, questions won and lost, seconds per step.
Exit status 1: a run failed. Needs pip install 'mtrl[compare]'.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtrl.commands.load_arguments import OptionParser, check_call, log_line, whole_number
from mtrl.commands.result_origin import describe_origin
from mtrl.compare.arms import Arm, load_arm, read_arm
from mtrl.compare.batch import SeedJob, measure_effects, pack, plan_jobs, run_batch, unpack
from mtrl.config import load_config, to_yaml
from mtrl.report.compare_page import NO_EFFECTS, GradientEffects, make_effects_page, write_pages
from mtrl.utils.errors import StartError
from mtrl.utils.files import write_file


def run(arguments: Sequence[str]) -> int:
    if find_spec("scipy") is None:
        raise StartError("mtrl compare needs scipy; pip install 'mtrl[compare]'")
    options, others = OPTIONS.parse_paths(arguments)
    overrides = [argument for argument in others if "=" in argument and not os.path.exists(argument)]
    paths = [argument for argument in others if argument not in overrides]
    out = Path(options.out or "comparison")
    if len(paths) < 2:
        OPTIONS.error("name at least two configurations or runs; the others are compared with the first")
    if runs := [path for path in paths if os.path.isdir(path)]:
        if len(runs) < len(paths):
            other = next(path for path in paths if path not in runs)
            raise StartError(f"{runs[0]} is a directory and {other} is not; compare runs, or configurations")
        if overrides:
            raise StartError(f"{overrides[0]}: these runs exist already; overrides are for configurations")
        return report([check_call(read_arm, Path(path)) for path in paths], out)
    arms = {Path(path).stem: path for path in paths}
    if len(arms) < len(paths):
        raise StartError("two configurations have the same file name; rename one, since results are listed by it")
    # An error in one is reported before hours are spent on another.
    configs = {name: load_config(path, overrides) for name, path in arms.items()}
    origins = {name: check_call(describe_origin, config) for name, config in configs.items()}
    files = {name: str(out / name / "arm.yaml") for name in arms}
    jobs = plan_jobs(files, options.seeds, (), out, origins)
    archive = Path(options.archive) if options.archive else None
    if archive is not None and archive.is_file() and not out.exists():
        unpack(archive, out)
    for job in jobs:
        job.is_done()  # an error if it is the result of other settings
    for name, config in configs.items():  # runs that start later read what was checked now
        Path(files[name]).parent.mkdir(parents=True, exist_ok=True)
        write_file(Path(files[name]), to_yaml(config))
    return run_all(jobs, options.jobs, options.minutes, archive)


def parse_seeds(text: str) -> range:
    """`3` is the first three seeds; `5-9` a range, since runs of other seeds may have been made elsewhere."""
    first, dash, last = text.partition("-")
    if not dash:
        return range(whole_number()(first))
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ArgumentTypeError(f"{text} is no range of seeds; write the first and the last, such as 5-9")
    return range(int(first), int(last) + 1)


OPTIONS = OptionParser(__doc__, "--out", "--archive")
OPTIONS.add_argument("--seeds", type=parse_seeds, default=range(5))
OPTIONS.add_argument("--jobs", type=whole_number(), default=1)
OPTIONS.add_argument("--minutes", type=whole_number())


def run_all(jobs: Sequence[SeedJob], at_once: int, minutes: int | None, archive: Path | None) -> int:
    """Train all jobs, as far as the time allows, and report on the finished ones."""
    out = jobs[0].out
    checks = measure_effects(jobs, at_once)
    print(make_effects_page(checks))
    failed, left = run_batch(jobs, at_once, None if minutes is None else 60.0 * minutes, log_line)
    finished: dict[str, list[Path]] = {job.arm: [] for job in jobs}
    for job in jobs:
        if job.is_done():
            finished[job.arm].append(job.directory)
    arms = [load_arm(name, run_dirs) for name, run_dirs in finished.items()]
    known = [arm for arm in arms if arm is not None]
    if len(known) == len(arms):
        report(known, out, checks)
    if left:
        log_line(f"{left} of {len(jobs)} runs are left; the same command resumes")
    if archive is not None:
        pack(out, archive, jobs)
    return 1 if failed else 0


def report(arms: Sequence[Arm], out: Path, checks: GradientEffects = NO_EFFECTS) -> int:
    print(check_call(write_pages, arms, out, checks))
    print(json.dumps({"arms": {arm.name: len(arm.runs) for arm in arms}, "report": str(out / "comparison.md")}))
    return 0
