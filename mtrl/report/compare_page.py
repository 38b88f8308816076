"""A comparison written down: Markdown with a table, a picture with bands, and JSON of all numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.compare.arms import Arm, endpoint
from mtrl.compare.statistics import Discordant, MeanEstimate, Paired, estimate, holm, mcnemar, paired
from mtrl.report.chart import Curve, Panel, draw_chart
from mtrl.report.markdown_pages import table
from mtrl.report.run_curves import metric_title

Checks = Mapping[str, Mapping[str, float]]
NONE: Checks = {}


@dataclass(frozen=True)
class Verdict:
    """One arm. What compares it with the baseline is None for the baseline itself."""

    arm: Arm
    final: MeanEstimate
    area: MeanEstimate
    by_final: Paired | None = None
    by_area: Paired | None = None
    questions: Discordant | None = None


def compare(arms: Sequence[Arm], metric: str) -> list[Verdict]:
    """Every arm against the first, Holm's correction over all of them, for each of the two endpoints by itself."""
    baseline, *others = arms
    verdicts = [judge(arm, baseline, metric) for arm in others]
    verdicts = adjusted(adjusted(verdicts, "by_final"), "by_area")
    return [verdict_alone(baseline, metric), *verdicts]


def verdict_alone(arm: Arm, metric: str) -> Verdict:
    return Verdict(arm, estimate([*arm.finals(metric).values()]), estimate([*arm.areas(metric).values()]))


def judge(arm: Arm, baseline: Arm, metric: str) -> Verdict:
    return replace(
        verdict_alone(arm, metric),
        by_final=paired(arm.finals(metric), baseline.finals(metric)),
        by_area=paired(arm.areas(metric), baseline.areas(metric)),
        questions=mcnemar(arm.right(), baseline.right()),
    )


def adjusted(verdicts: Sequence[Verdict], endpoint: str) -> list[Verdict]:
    tested = {place: test for place, v in enumerate(verdicts) if (test := getattr(v, endpoint)) and test.p is not None}
    found = list(verdicts)
    for (place, test), p in zip(tested.items(), holm([test.p for test in tested.values()]), strict=True):
        found[place] = replace(found[place], **{endpoint: replace(test, adjusted=p)})
    return found


def write_pages(arms: Sequence[Arm], directory: Path, checks: Checks = NONE) -> str:
    """comparison.md, .png and .json; returned is the text. `checks`: what rules do to a gradient, by arm."""
    metric = endpoint(arms)
    verdicts = compare(arms, metric)
    text = page(verdicts, metric) + (f"\n{check_page(checks)}" if checks else "")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "comparison.md").write_text(text, encoding="utf-8")
    (directory / "comparison.json").write_text(json.dumps(numbers(verdicts, metric), indent=1) + "\n")
    draw_chart(directory / "comparison.png", f"{len(arms)} arms", [panel(arms, metric)], note="Bands: 95% over seeds.")
    return text


def numbers(verdicts: Sequence[Verdict], metric: str) -> dict[str, Any]:
    """All of it, for programs."""
    rows = []
    for verdict in verdicts:
        arm = verdict.arm
        raw = {"final": arm.finals(metric), "area": arm.areas(metric)}
        rest = {name: asdict(value) for name, value in vars(verdict).items() if name != "arm" and value is not None}
        rows.append({"arm": arm.name, "seeds": sorted(arm.runs), "by_seed": raw, "seconds_step": arm.seconds, **rest})
    return {"metric": metric, "arms": rows}


HOW = """Means over seeds with 95% bootstrap intervals; the area is the mean height of the curve. Differences are those
of runs of one seed, to {baseline}; p by the paired t-test, and with Holm's correction over the arms. Questions of the
last validation: McNemar's exact test, which takes each answer of each seed for one by itself."""


def page(verdicts: Sequence[Verdict], metric: str) -> str:
    name = verdicts[0].arm.name
    tests = [head for what in ("final", "area") for head in (f"{what}, to {name}", "p", "Holm")]
    heads = ["arm", "seeds", "final", "area", *tests, "questions won, lost", "p", "s a step"]
    rows = table(heads, [table_row(verdict) for verdict in verdicts])
    title = f"# {len(verdicts)} arms compared by {metric_title(metric)}"
    return f"{title}\n\n{HOW.format(baseline=name)}\n\n{rows}\n\n![curves](comparison.png)\n"


def check_page(checks: Checks) -> str:
    """Before training: an arm whose gradient points where that of plain credit does cannot learn another thing."""
    heads = ["arm", "cosine to the plain gradient", "norm over the plain one", "kept |A| (1 - p)", "effective tokens",
             "of plain credit"]  # fmt: skip
    names = ("cosine", "size", "kept_surprise", "effective_tokens", "plain_tokens")
    rows = [[arm, *(f"{found[name]:.3g}" for name in names)] for arm, found in checks.items()]
    return f"## What the rules do to the gradient of the first step\n\n{table(heads, rows)}\n"


def table_row(verdict: Verdict) -> list[str]:
    cells = [verdict.arm.name, str(len(verdict.arm.runs)), told(verdict.final), told(verdict.area)]
    for test in (verdict.by_final, verdict.by_area):
        if test is None:
            cells += ["", "", ""]
        else:
            cells += [told(test.difference, signed=True), told_p(test.p), told_p(test.adjusted)]
    questions = verdict.questions
    cells += ["", ""] if questions is None else [f"{questions.gained}, {questions.lost}", told_p(questions.p)]
    return [*cells, "" if verdict.arm.seconds is None else f"{verdict.arm.seconds:.2f}"]


def told(value: MeanEstimate, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if value.low is None or value.high is None:
        return f"{value.mean:{sign}.3f}"
    return f"{value.mean:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"


def told_p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def panel(arms: Sequence[Arm], metric: str) -> Panel:
    return Panel(metric_title(metric), [line(arm, metric) for arm in arms], (0.0, 1.0) if "avg@" in metric else None)


def line(arm: Arm, metric: str) -> Curve:
    """The mean over seeds at the steps that all of them have, and its interval."""
    curves = [dict(run.curves[metric]) for run in arm.runs.values() if metric in run.curves]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = {step: estimate([curve[step] for curve in curves]) for step in steps}
    band = [(step, m.low, m.high) for step, m in means.items() if m.low is not None and m.high is not None]
    return Curve(arm.name, [(step, m.mean) for step, m in means.items()], band=band)
