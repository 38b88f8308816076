"""The study of docs/study.md: its runs in one small file, and its tables and picture from that file.

mtrl compare study/grpo.yaml .. --seeds 5 --jobs 12 --out study    # the runs, where there is a GPU
python -m benchmarks.study keep study [another ..]                 # what is compared, into results/study.json.gz
python -m benchmarks.study                                         # docs/study_results.md and docs/study.png

What is kept may come from such a file of another machine, too.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.compare.arms import Arm, SeedRun, endpoint, read_arm
from mtrl.compare.batch import CHECK
from mtrl.compare.pages import Checks, Verdict, adjusted, check_page, compare, judge, line, page, told, told_p
from mtrl.report.chart import Panel, draw_chart
from mtrl.report.pages import table

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks/results/study.json.gz"
TWICE = KEPT.with_name("study_twice_the_rate.json.gz")  # the supplement's
PAGE, PICTURE = ROOT / "docs/study_results.md", ROOT / "docs/study.png"
BASELINE = "grpo"
NEW_PAIRS = "val/by_pair/new"
CURVES = ("val/", "reward/", "actor/", "response_length/mean", "perf/seconds_step")
PAIRS = (  # hypotheses 3 to 5: what is not compared with plain GRPO
    ("tgf_20", "random_20"), ("tgf_20", "shuffled_tokens"), ("tgf_20", "shuffled_rows"), ("tgf_40", "random_40"),
    ("oracle", "random_10"), ("bottom", "random_20"), ("tgf_20", "grpo_matched"),
    ("experiment3", "experiment1"), ("experiment4", "experiment1"), ("experiment5", "experiment1"),
)  # fmt: skip
DRAWN = ("grpo", "oracle", "tgf_20", "random_20", "random_10", "shuffled_tokens", "bottom", "blank")
SMALL = 0.02  # a difference within it, by its interval, is too small to matter
ALPHA = 0.025  # two looks, a half of 0.05 each
LOOK = 5  # seeds of the first look: before it nothing is decided


# ------------------------------------------------------------------------------------------------------ the small file
def keep(places: Iterable[Path], file: Path = KEPT) -> dict[str, list[int]]:
    """Adds the finished runs of these directories, or files as this one; what it holds already stays. Seeds by arm."""
    arms, checks = load(file) if file.exists() else ({}, {})
    for place in places:
        more, measured = load(place) if place.is_file() else finished(place)
        checks |= measured
        for name, arm in more.items():
            runs = {**arm.runs, **(arms[name].runs if name in arms else {})}
            arms[name] = Arm(name, dict(sorted(runs.items())))
    save(arms, checks, file)
    return {name: list(arm.runs) for name, arm in arms.items()}


def finished(directory: Path) -> tuple[dict[str, Arm], dict[str, Mapping[str, float]]]:
    """What `mtrl compare` left in a directory: of each arm the runs that went through, and its check."""
    arms, checks = {}, {}
    for place in sorted(path for path in directory.iterdir() if path.is_dir()):
        if check := text_of(place / CHECK):
            checks[place.name] = json.loads(check)
        done = {int(path.stem.removeprefix("seed_")) for path in place.glob("seed_*.done")}
        if done:
            runs = {seed: run for seed, run in read_arm(place).runs.items() if seed in done}
            arms[place.name] = Arm(place.name, runs)
    return arms, checks


def text_of(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def save(arms: Mapping[str, Arm], checks: Checks, file: Path) -> None:
    """Curves with six digits, and of each question whether it was right, as bits in the order of their names."""
    questions = sorted({name for arm in arms.values() for run in arm.runs.values() for name in run.right})
    runs = {name: {seed: packed(run, questions) for seed, run in arm.runs.items()} for name, arm in arms.items()}
    whole = json.dumps({"questions": questions, "checks": checks, "arms": runs}, separators=(",", ":"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(whole.encode(), mtime=0))


def packed(run: SeedRun, questions: Sequence[str]) -> dict[str, Any]:
    curves = {
        name: [[step, float(f"{value:.6g}")] for step, value in points]
        for name, points in run.curves.items() if name.startswith(CURVES)
    }  # fmt: skip
    return {"curves": curves, "right": "".join("-01"[1 + run.right[q] if q in run.right else 0] for q in questions)}


def load(file: Path = KEPT) -> tuple[dict[str, Arm], dict[str, Mapping[str, float]]]:
    whole = json.loads(gzip.decompress(file.read_bytes()))
    arms = {}
    for name, runs in whole["arms"].items():
        arms[name] = Arm(name, {int(seed): unpacked(int(seed), run, whole["questions"]) for seed, run in runs.items()})
    return arms, whole["checks"]


def unpacked(seed: int, run: Mapping[str, Any], questions: Sequence[str]) -> SeedRun:
    right = {name: mark == "1" for name, mark in zip(questions, run["right"], strict=True) if mark != "-"}
    return SeedRun(seed, {name: [tuple(p) for p in points] for name, points in run["curves"].items()}, right)


# ----------------------------------------------------------------------------------------------------- tables, picture
def word_of(verdict: Verdict) -> str:
    """What the plan calls an effect, too small to matter, or open."""
    test = verdict.by_final
    if test is None:
        return ""
    if test.adjusted is not None and test.adjusted < ALPHA:
        return "better" if test.difference.mean > 0 else "worse"
    low, high = test.difference.low, test.difference.high
    within = low is not None and high is not None and low > -SMALL and high < SMALL
    return "too small to matter" if within else "open"


def words_table(verdicts: Sequence[Verdict]) -> str:
    """The table that the study is about: sorted by the difference, with the word of the plan."""
    first, *others = verdicts
    others = sorted(others, key=lambda v: -v.by_final.difference.mean if v.by_final else 0.0)
    rows = [
        [v.arm.name, str(len(v.arm.runs)), told(v.final), *said_of(v), on_new_pairs(v.arm)] for v in (first, *others)
    ]
    return table(["arm", "seeds", "accuracy", f"to {first.arm.name}", "p (Holm)", "word", "new pairs"], rows)


def on_new_pairs(arm: Arm) -> str:
    """Accuracy on compositions that no picture of the training has."""
    found = arm.finals(NEW_PAIRS).values()
    return f"{sum(found) / len(found):.3f}" if found else ""


def pairs_table(arms: Mapping[str, Arm], metric: str) -> str:
    there = [(a, b) for a, b in PAIRS if a in arms and b in arms]
    verdicts = adjusted([judge(arms[a], arms[b], metric) for a, b in there], "by_final")
    rows = [[f"{a} - {b}", *said_of(v)] for (a, b), v in zip(there, verdicts, strict=True)]
    return table(["pair", "difference of accuracy", "p (Holm)", "word"], rows)


def said_of(verdict: Verdict) -> list[str]:
    test = verdict.by_final
    if test is None:
        return ["", "", ""]
    return [told(test.difference, signed=True), told_p(test.adjusted), word_of(verdict)]


HEAD = """# Results of the study

Written by `python -m benchmarks.study` from benchmarks/results/study.json.gz; what they mean is said in
[study.md](study.md). better, worse: p after Holm below {alpha}; too small to matter: the interval lies within ±{small}.
new pairs: accuracy on the half of the test whose colour and shape are never together in training.
{caution}"""


def caution(arms: Sequence[Arm]) -> str:
    few = sum(len(arm.runs) < LOOK for arm in arms)
    told = f"{few} of {len(arms)} arms have fewer than {LOOK} seeds: no word of theirs is a decision yet."
    return f"**{told}**" if few else ""


def compared(found: Mapping[str, Arm]) -> tuple[list[Verdict], str]:
    """Every arm against the baseline, by which number."""
    arms = [found[BASELINE], *(arm for name, arm in sorted(found.items()) if name != BASELINE)]
    metric = endpoint(arms)
    return compare(arms, metric), metric


def supplement(file: Path) -> str:
    if not file.exists():
        return ""
    return f"## The supplement: twice the rate\n\n{words_table(compared(load(file)[0])[0])}"


def write(file: Path = KEPT, page_file: Path = PAGE, picture: Path = PICTURE, twice: Path = TWICE) -> str:
    found, checks = load(file)
    verdicts, metric = compared(found)
    parts = [
        HEAD.format(alpha=ALPHA, small=SMALL, caution=caution(list(found.values()))), words_table(verdicts),
        "## Pairs of hypotheses 3 to 5", "A family of its own, corrected by itself.", pairs_table(found, metric),
        supplement(twice),
        "## Everything", page(verdicts, metric).partition("\n\n")[2].replace("comparison.png", picture.name),
        check_page(checks),
    ]  # fmt: skip
    page_file.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    drawn = [found[name] for name in DRAWN if name in found]
    panel = Panel("accuracy on the test", [line(arm, metric) for arm in drawn], (0.0, 1.0))
    draw_chart(picture, "The study", [panel], note="Means over seeds. Bands: 95% over seeds.")
    return words_table(verdicts)


def main(words: Sequence[str]) -> None:
    if words and words[0] == "keep":
        for name, seeds in keep(map(Path, words[1:])).items():
            print(f"{name}: seeds {', '.join(map(str, seeds))}")
    else:
        print(write())


if __name__ == "__main__":
    main(sys.argv[1:])
