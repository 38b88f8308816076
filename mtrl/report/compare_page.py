"""The report of `mtrl compare`: a Markdown table, a chart with confidence bands, and JSON with all numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.compare.arms import Arm, choose_endpoint
from mtrl.compare.statistics import Discordant, MeanEstimate, Paired, compare_paired, estimate, holm, mcnemar
from mtrl.report.arm_differences import different_settings, make_differences_page, rule_metrics
from mtrl.report.chart import Curve, Panel, draw_chart
from mtrl.report.markdown_text import table
from mtrl.report.run_curves import metric_title

GradientEffects = Mapping[str, Mapping[str, float]]  # arm -> measure -> value
NO_EFFECTS: GradientEffects = {}


@dataclass(frozen=True)
class Verdict:
    """The results of one arm. The comparisons with the baseline are None for the baseline itself."""

    arm: Arm
    final: MeanEstimate
    area: MeanEstimate
    by_final: Paired | None = None
    by_area: Paired | None = None
    questions: Discordant | None = None


def compare(arms: Sequence[Arm], metric: str) -> list[Verdict]:
    """Compare every arm with the first; Holm's correction covers all arms, separately for final value and area."""
    baseline, *others = arms
    verdicts = [compare_with_baseline(arm, baseline, metric) for arm in others]
    return [summarize(baseline, metric), *apply_holm(apply_holm(verdicts, "by_final"), "by_area")]


def summarize(arm: Arm, metric: str) -> Verdict:
    return Verdict(arm, estimate([*arm.finals(metric).values()]), estimate([*arm.areas(metric).values()]))


def compare_with_baseline(arm: Arm, baseline: Arm, metric: str) -> Verdict:
    return replace(
        summarize(arm, metric),
        by_final=compare_paired(arm.finals(metric), baseline.finals(metric)),
        by_area=compare_paired(arm.areas(metric), baseline.areas(metric)),
        questions=mcnemar(arm.correct(), baseline.correct()),
    )


def apply_holm(verdicts: Sequence[Verdict], endpoint: str) -> list[Verdict]:
    tests = {i: test for i, v in enumerate(verdicts) if (test := getattr(v, endpoint)) and test.p is not None}
    corrected = list(verdicts)
    for (i, test), p in zip(tests.items(), holm([test.p for test in tests.values()]), strict=True):
        corrected[i] = replace(corrected[i], **{endpoint: replace(test, adjusted=p)})
    return corrected


def write_pages(arms: Sequence[Arm], directory: Path, effects: GradientEffects = NO_EFFECTS) -> str:
    """Write comparison.md, .png and .json, and return the Markdown."""
    metric = choose_endpoint(arms)
    verdicts = compare(arms, metric)
    text = make_page(verdicts, metric) + make_differences_page(arms)
    text += f"\n{make_effects_page(effects)}" if effects else ""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "comparison.md").write_text(text, encoding="utf-8")
    (directory / "comparison.json").write_text(json.dumps(as_json(verdicts, metric), indent=1) + "\n")
    bounds = (0.0, 1.0) if "avg@" in metric else None
    panel = Panel(metric_title(metric), [mean_curve(arm, metric) for arm in arms], bounds)
    draw_chart(directory / "comparison.png", f"{len(arms)} arms", [panel], note="Bands: 95% over seeds.")
    return text


def as_json(verdicts: Sequence[Verdict], metric: str) -> dict[str, Any]:
    rows = []
    for verdict in verdicts:
        arm = verdict.arm
        by_seed = {"final": arm.finals(metric), "area": arm.areas(metric)}
        rest = {name: asdict(value) for name, value in vars(verdict).items() if name != "arm" and value is not None}
        head = {"arm": arm.name, "seeds": sorted(arm.runs), "by_seed": by_seed, "seconds_step": arm.seconds}
        rows.append({**head, **rest})
    arms = [verdict.arm for verdict in verdicts]
    return {
        "metric": metric,
        "arms": rows,
        "settings": different_settings(arms),
        "rule_metrics": rule_metrics(arms),
    }


HOW = """Means over seeds with 95% bootstrap intervals; the area is the mean height of the curve. Differences to
{baseline} are between runs of the same seed; p is from the paired t-test, Holm is p corrected over the arms. Questions
are those of the last validation; McNemar's exact test treats each answer of each seed as independent."""


def make_page(verdicts: Sequence[Verdict], metric: str) -> str:
    name = verdicts[0].arm.name
    rows = table(table_heads(name), [table_row(verdict) for verdict in verdicts])
    title = f"# {len(verdicts)} arms compared by {metric_title(metric)}"
    return f"{title}\n\n{HOW.format(baseline=name)}\n\n{rows}\n\n![curves](comparison.png)\n"


def make_effects_page(effects: GradientEffects) -> str:
    """What the rules do to the gradient before training: an arm with the gradient of plain credit learns the same."""
    heads = ["arm", "cosine to the plain gradient", "norm / plain norm", "kept |A| (1 - p)", "effective tokens",
             "with plain credit"]  # fmt: skip
    names = ("cosine", "size", "kept_surprise", "effective_tokens", "plain_tokens")
    rows = [[arm, *(f"{measures[name]:.3g}" for name in names)] for arm, measures in effects.items()]
    return f"## What the rules do to the gradient of the first step\n\n{table(heads, rows)}\n"


def table_heads(baseline: str) -> list[str]:
    tests = [head for what in ("final", "area") for head in (f"{what}, to {baseline}", "p", "Holm")]
    return ["arm", "seeds", "final", "area", *tests, "questions won, lost", "p", "s per step"]


def table_row(verdict: Verdict) -> list[str]:
    cells = [
        verdict.arm.name,
        str(len(verdict.arm.runs)),
        format_estimate(verdict.final),
        format_estimate(verdict.area),
    ]
    for test in (verdict.by_final, verdict.by_area):
        if test is None:
            cells += ["", "", ""]
        else:
            cells += [format_estimate(test.difference, signed=True), format_p(test.p), format_p(test.adjusted)]
    questions = verdict.questions
    cells += ["", ""] if questions is None else [f"{questions.gained}, {questions.lost}", format_p(questions.p)]
    return [*cells, "" if verdict.arm.seconds is None else f"{verdict.arm.seconds:.2f}"]


def format_estimate(value: MeanEstimate, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if value.low is None or value.high is None:
        return f"{value.mean:{sign}.3f}"
    return f"{value.mean:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"


def format_p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def mean_curve(arm: Arm, metric: str) -> Curve:
    """The mean over seeds at the steps that all seeds have, with its interval as a band."""
    curves = [dict(run.curves[metric]) for run in arm.runs.values() if metric in run.curves]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = {step: estimate([curve[step] for curve in curves]) for step in steps}
    band = [(step, m.low, m.high) for step, m in means.items() if m.low is not None and m.high is not None]
    return Curve(arm.name, [(step, m.mean) for step, m in means.items()], band=band)
