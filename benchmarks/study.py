"""The study of docs/study.md: stores its runs in one small file, and makes its tables and picture from that file.

mtrl compare study/grpo.yaml .. --seeds 5 --jobs 12 --out study    # train the runs, on a GPU
python -m benchmarks.study keep study [another ..]                 # store the compared values in results/study.json.gz
python -m benchmarks.study                                         # write docs/study_results.md and docs/study.png

`keep` also accepts such a file of another machine.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mtrl.compare.arms import Arm, SeedRun, choose_endpoint, read_arm
from mtrl.compare.batch import EFFECTS_FILE
from mtrl.report.chart import Panel, draw_chart
from mtrl.report.compare_page import (
    GradientEffects,
    Verdict,
    apply_holm,
    compare,
    compare_with_baseline,
    format_estimate,
    format_p,
    make_effects_page,
    make_page,
    mean_curve,
)
from mtrl.report.markdown_text import table

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks/results/study.json.gz"
TWICE = KEPT.with_name("study_twice_the_rate.json.gz")  # runs of the supplement
PAGE, PICTURE = ROOT / "docs/study_results.md", ROOT / "docs/study.png"
BASELINE = "grpo"
NEW_PAIRS = "val/by_pair/new"
SAMPLED = "reward/accuracy"  # accuracy of the responses that a step samples and trains on
ENTROPY = "actor/entropy"
WINDOW = 10  # steps averaged into one value of SAMPLED; the last window is steps 21 to 30
CURVES = ("val/", "reward/", "actor/", "response_length/mean", "perf/seconds_step")
PAIRS = (  # hypotheses 3 to 5: comparisons without plain GRPO
    ("tgf_20", "random_20"), ("tgf_20", "shuffled_tokens"), ("tgf_20", "shuffled_rows"), ("tgf_40", "random_40"),
    ("oracle", "random_10"), ("bottom", "random_20"), ("tgf_20", "grpo_matched"),
    ("experiment3", "experiment1"), ("experiment4", "experiment1"), ("experiment5", "experiment1"),
)  # fmt: skip
RATES = ("grpo", "hidden_similarity", "oracle")  # arms at 1e-5 that plain GRPO at 2e-5 is compared with
DRAWN = ("grpo", "oracle", "tgf_20", "random_20", "random_10", "shuffled_tokens", "bottom", "blank")
SMALL = 0.02  # a difference whose interval lies within this is too small to matter
ALPHA = 0.025  # two looks share 0.05
LOOK = 5  # seeds of the first look; with fewer, nothing is decided


# ------------------------------------------------------------------------------------------------------ the small file
def keep(paths: Iterable[Path], file: Path = KEPT) -> dict[str, list[int]]:
    """Adds the finished runs of directories or such files; runs already stored stay. Returns the seeds of each arm."""
    arms, checks = load(file) if file.exists() else ({}, {})
    for path in paths:
        more, measured = load(path) if path.is_file() else read_finished(path)
        checks |= measured
        for name, arm in more.items():
            runs = {**arm.runs, **(arms[name].runs if name in arms else {})}
            arms[name] = Arm(name, dict(sorted(runs.items())))
    save(arms, checks, file)
    return {name: list(arm.runs) for name, arm in arms.items()}


def read_finished(directory: Path) -> tuple[dict[str, Arm], dict[str, Mapping[str, float]]]:
    """The finished runs of each arm in a directory of `mtrl compare`, and the arms' checks."""
    arms, checks = {}, {}
    for arm_dir in sorted(path for path in directory.iterdir() if path.is_dir()):
        if check := config_text(arm_dir / EFFECTS_FILE):
            checks[arm_dir.name] = json.loads(check)
        done = {int(path.stem.removeprefix("seed_")) for path in arm_dir.glob("seed_*.done")}
        if done:
            runs = {seed: run for seed, run in read_arm(arm_dir).runs.items() if seed in done}
            arms[arm_dir.name] = Arm(arm_dir.name, runs)
    return arms, checks


def config_text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def save(arms: Mapping[str, Arm], checks: GradientEffects, file: Path) -> None:
    """Writes curves with six digits, and whether each question was answered correctly as bits, sorted by name."""
    questions = sorted({name for arm in arms.values() for run in arm.runs.values() for name in run.correct})
    runs = {name: {seed: packed(run, questions) for seed, run in arm.runs.items()} for name, arm in arms.items()}
    whole = json.dumps({"questions": questions, "checks": checks, "arms": runs}, separators=(",", ":"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(whole.encode(), mtime=0))


def packed(run: SeedRun, questions: Sequence[str]) -> dict[str, Any]:
    curves = {
        name: [[step, float(f"{value:.6g}")] for step, value in points]
        for name, points in run.curves.items() if name.startswith(CURVES)
    }  # fmt: skip
    return {"curves": curves, "right": "".join("-01"[1 + run.correct[q] if q in run.correct else 0] for q in questions)}


def load(file: Path = KEPT) -> tuple[dict[str, Arm], dict[str, Mapping[str, float]]]:
    whole = json.loads(gzip.decompress(file.read_bytes()))
    arms = {}
    for name, runs in whole["arms"].items():
        arms[name] = Arm(name, {int(seed): unpacked(int(seed), run, whole["questions"]) for seed, run in runs.items()})
    return arms, whole["checks"]


def unpacked(seed: int, run: Mapping[str, Any], questions: Sequence[str]) -> SeedRun:
    right = {name: mark == "1" for name, mark in zip(questions, run["right"], strict=True) if mark != "-"}
    return SeedRun(seed, {name: [tuple(p) for p in points] for name, points in run["curves"].items()}, right)


# ------------------------------------------------------------------------------------------------------- two endpoints
@dataclass(frozen=True)
class Endpoints:
    """One comparison by both endpoints: greedy accuracy on the test, sampled accuracy in training."""

    greedy: Verdict
    sampled: Verdict


def by_windows(arm: Arm, metric: str = SAMPLED) -> Arm:
    """The arm with a metric of single steps as means of WINDOW steps, each at the last step of its window."""
    runs = {seed: SeedRun(seed, {metric: window_means(run.curves[metric])}) for seed, run in arm.runs.items()}
    return Arm(arm.name, runs)


def window_means(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """
    >>> window_means([(1, 0.0), (10, 1.0), (11, 0.25)])
    [(10, 0.5), (20, 0.25)]
    """
    windows: dict[float, list[float]] = {}
    for step, value in points:
        windows.setdefault(-(-step // WINDOW) * WINDOW, []).append(value)
    return [(last, fmean(values)) for last, values in windows.items()]


def compare_arms(found: Mapping[str, Arm]) -> tuple[list[Endpoints], str]:
    """Every arm against the baseline by both endpoints, and the name of the greedy one. Holm's correction is over the
    arms, for each endpoint separately."""
    arms = [found[BASELINE], *(arm for name, arm in sorted(found.items()) if name != BASELINE)]
    metric = choose_endpoint(arms)
    greedy, sampled = compare(arms, metric), compare([by_windows(arm) for arm in arms], SAMPLED)
    return [Endpoints(*each) for each in zip(greedy, sampled, strict=True)], metric


def compare_pairs(pairs: Sequence[tuple[Arm, Arm]], metric: str) -> list[Endpoints]:
    """The first arm of each pair against the second, corrected as one family."""
    greedy = [compare_with_baseline(a, b, metric) for a, b in pairs]
    sampled = [compare_with_baseline(by_windows(a), by_windows(b), SAMPLED) for a, b in pairs]
    families = apply_holm(greedy, "by_final"), apply_holm(sampled, "by_final")
    return [Endpoints(*each) for each in zip(*families, strict=True)]


def planned_pairs(found: Mapping[str, Arm], metric: str) -> dict[str, Endpoints]:
    pairs = [(found[a], found[b]) for a, b in PAIRS if a in found and b in found]
    return dict(zip([f"{a.name} - {b.name}" for a, b in pairs], compare_pairs(pairs, metric), strict=True))


def across_rates(found: Mapping[str, Arm], twice: Mapping[str, Arm], metric: str) -> dict[str, Endpoints]:
    """Plain GRPO at twice the rate against arms at the rate of the study."""
    arms = [found[name] for name in RATES if name in found]
    compared = compare_pairs([(twice[BASELINE], arm) for arm in arms], metric)
    return {f"{BASELINE} at 2e-5 - {arm.name} at 1e-5": each for arm, each in zip(arms, compared, strict=True)}


# ----------------------------------------------------------------------------------------------------- tables, picture
def judge(verdict: Verdict) -> str:
    """The plan's verdict: better, worse, too small to matter, or open."""
    test = verdict.by_final
    if test is None:
        return ""
    if test.adjusted is not None and test.adjusted < ALPHA:
        return "better" if test.difference.mean > 0 else "worse"
    low, high = test.difference.low, test.difference.high
    within = low is not None and high is not None and low > -SMALL and high < SMALL
    return "too small to matter" if within else "open"


def format_cells(verdict: Verdict) -> list[str]:
    """Difference, p, p after Holm, and the plan's verdict."""
    test = verdict.by_final
    if test is None:
        return ["", "", "", ""]
    return [format_estimate(test.difference, signed=True), format_p(test.p), format_p(test.adjusted), judge(verdict)]


def arms_table(compared: Sequence[Endpoints], found: Mapping[str, Arm]) -> str:
    """The main table: both endpoints side by side, sorted by the difference in greedy accuracy."""
    first, *others = compared
    others = sorted(others, key=lambda e: -e.greedy.by_final.difference.mean if e.greedy.by_final else 0.0)
    rows = []
    for each in (first, *others):
        arm = found[each.greedy.arm.name]
        means = mean_final(arm, NEW_PAIRS), mean_final(by_windows(arm, ENTROPY), ENTROPY)
        sides = [[format_estimate(side.final), *format_cells(side)] for side in (each.greedy, each.sampled)]
        rows.append([arm.name, str(len(arm.runs)), *sides[0], *sides[1], *means])
    tests = [f"to {BASELINE}", "p", "Holm", "verdict"]
    return table(["arm", "seeds", "greedy", *tests, "sampled", *tests, "new pairs", "entropy"], rows)


def mean_final(arm: Arm, metric: str) -> str:
    found = arm.finals(metric).values()
    return f"{fmean(found):.3f}" if found else ""


def pairs_table(compared: Mapping[str, Endpoints]) -> str:
    tests = ["p", "Holm", "verdict"]
    rows = [[name, *format_cells(each.greedy), *format_cells(each.sampled)] for name, each in compared.items()]
    return table(["pair", "greedy", *tests, "sampled", *tests], rows)


HEAD = """# Results of the study

Written by `python -m benchmarks.study` from benchmarks/results/study.json.gz and study_twice_the_rate.json.gz. What
follows from them is in [study.md](study.md).

- greedy: accuracy on the 2,000 test questions after the last step, at temperature 0. The endpoint of the plan.
- sampled: `reward/accuracy`, the accuracy of the 128 responses that each step samples at temperature 1 and trains on,
  mean over steps 21 to 30. It is what training optimises. We added it after the runs.
- to {baseline}: mean over seeds of the difference between runs of the same seed, with a 95% bootstrap interval; p of
  the paired t-test (two-sided); Holm: p corrected over the arms of a table, for each endpoint separately.
- verdict: better or worse where p after Holm is below {alpha}; too small to matter where the interval lies within
  ±{small}; open otherwise. The plan set this rule for the greedy endpoint; the sampled columns apply the same rule.
- new pairs: greedy accuracy on the half of the test whose colour and shape never appear together in training.
- entropy: `actor/entropy`, mean over steps 21 to 30.

{seeds}
{caution}"""


def seeds_note(found: Mapping[str, Arm], metric: str) -> str:
    """The baseline on the seeds of the first look: most differences are to these runs, not to all of the baseline's."""
    first = {seed: run for seed, run in found[BASELINE].runs.items() if seed < LOOK}
    if len(first) == len(found[BASELINE].runs):
        return ""
    few, seeds = Arm(BASELINE, first), len(found[BASELINE].runs)
    greedy, sampled = mean_final(few, metric), mean_final(by_windows(few), SAMPLED)
    return (
        f"An arm of {LOOK} seeds is compared with the same {LOOK} seeds of {BASELINE}, which has {seeds}.\n"
        f"On seeds 0 to {LOOK - 1} {BASELINE} is at {greedy} greedy and {sampled} sampled."
    )


def caution(arms: Sequence[Arm]) -> str:
    few = sum(len(arm.runs) < LOOK for arm in arms)
    warning = f"{few} of {len(arms)} arms have fewer than {LOOK} seeds: no word of theirs is a decision yet."
    return f"**{warning}**" if few else ""


def supplement(found: Mapping[str, Arm], file: Path) -> str:
    if not file.exists():
        return ""
    twice = load(file)[0]
    compared, metric = compare_arms(twice)
    parts = [
        "## The supplement: twice the rate", "All arms of this table, grpo too, are trained at 2e-5.",
        arms_table(compared, twice),
        "## Plain GRPO at twice the rate against arms at 1e-5", "Corrected as a family of its own.",
        pairs_table(across_rates(found, twice, metric)),
    ]  # fmt: skip
    return "\n\n".join(parts)


def write(file: Path = KEPT, page_file: Path = PAGE, picture: Path = PICTURE, twice: Path = TWICE) -> str:
    found, checks = load(file)
    compared, metric = compare_arms(found)
    arms = arms_table(compared, found)
    head = HEAD.format(
        baseline=BASELINE, alpha=ALPHA, small=SMALL, seeds=seeds_note(found, metric),
        caution=caution(list(found.values())),
    )  # fmt: skip
    everything = make_page([each.greedy for each in compared], metric).partition("\n\n")[2]
    parts = [
        head, arms, "## Pairs of hypotheses 3 to 5", "Corrected as a family of its own.",
        pairs_table(planned_pairs(found, metric)), supplement(found, twice), "## Everything of the greedy endpoint",
        everything.replace("comparison.png", picture.name), make_effects_page(checks),
    ]  # fmt: skip
    page_file.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    draw(found, metric, picture)
    return arms


def draw(found: Mapping[str, Arm], metric: str, picture: Path) -> None:
    drawn = [found[name] for name in DRAWN if name in found]
    panels = [
        Panel("greedy accuracy on the test", [mean_curve(arm, metric) for arm in drawn], (0.0, 1.0)),
        Panel("sampled accuracy in training", [mean_curve(by_windows(arm), SAMPLED) for arm in drawn], (0.0, 1.0)),
    ]
    note = f"Means over seeds. Bands: 95% over seeds. Right: mean of the last {WINDOW} steps."
    draw_chart(picture, "The study", panels, note=note)


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] == "keep":
        for name, seeds in keep(map(Path, arguments[1:])).items():
            print(f"{name}: seeds {', '.join(map(str, seeds))}")
    else:
        print(write())


if __name__ == "__main__":
    main(sys.argv[1:])
