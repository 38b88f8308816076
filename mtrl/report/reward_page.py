"""The report of `mtrl reward`: a trial of a reward function, for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mtrl.report.markdown_text import shorten
from mtrl.rewards.dry_run import DryRunResult, ScoredResponse, ValueSummary, histogram

LISTED = 5  # slowest and failed responses listed, of each at most
BAR_CHARS = 40  # length of the longest bar in the histogram
PREVIEW_CHARS = 60  # shown of a response


def report(trial: DryRunResult) -> str:
    blocks = [parts_table(trial), distribution(trial), slowest(trial), failures(trial), pace(trial)]
    return "\n\n".join(block for block in blocks if block)


def summary(trial: DryRunResult) -> dict[str, Any]:
    """The trial for JSON, with null for NaN."""
    return {
        "function": trial.name,
        "samples": len(trial.responses),
        "failed": len(trial.failed),
        "mean": ValueSummary.from_values(trial.totals).mean,
        "parts": {
            name: {key: None if math.isnan(value) else value for key, value in asdict(part).items()}
            for name, part in trial.parts().items()
        },
        "seconds": round(trial.seconds, 3),
        "calls_per_second": round(len(trial.responses) / max(trial.seconds, 1e-9), 1),
    }


def parts_table(trial: DryRunResult) -> str:
    heads = ("mean", "std", "min", "max")
    lines = [f"{'part':<24}" + "".join(f"{head:>10}" for head in heads) + f"{'n/a':>8}{'failed':>8}"]
    rows = {**trial.parts(), "total": ValueSummary.from_values(trial.totals)}
    for name, spread in rows.items():
        numbers = (spread.mean, spread.std, spread.min, spread.max)
        cells = "".join(f"{'-' if math.isnan(number) else f'{number:.4f}':>10}" for number in numbers)
        failed = len(trial.failed) if name == trial.name else 0
        lines.append(f"{name:<24}{cells}{spread.absent:>8}{failed:>8}")
    return "\n".join(lines)


def distribution(trial: DryRunResult) -> str:
    bins = histogram(trial.totals)
    most = max(count for _, _, count in bins)
    lines = ["total"]
    for low, high, count in bins:
        label = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        lines.append(f"  {label:>22}  {'#' * math.ceil(BAR_CHARS * count / most):<{BAR_CHARS}} {count}")
    return "\n".join(lines)


def slowest(trial: DryRunResult) -> str:
    lines = [f"{1000 * each.outcome.seconds:10.1f} ms  {preview(each)}" for each in trial.slowest(LISTED)]
    return "\n".join(["slowest", *lines]) if lines else ""


def failures(trial: DryRunResult) -> str:
    """The failed responses with the last line of their tracebacks; the first traceback in full."""
    if not trial.failed:
        return ""
    counts = f"each counts as failure_reward={trial.failure_reward:g}"
    lines = [f"failed: {len(trial.failed)} of {len(trial.responses)}; {counts}"]
    for each in trial.failed[:LISTED]:
        last_line = (each.outcome.failure or "").strip().rpartition("\n")[2]
        lines.append(f"  {preview(each)}\n      {last_line}")
    if len(trial.failed) > LISTED:
        lines.append(f"  ... and {len(trial.failed) - LISTED} more")
    first = trial.failed[0].outcome
    whole = "\n".join(text.strip() for text in (first.failure or "", first.output) if text.strip())
    if "\n" in whole:
        lines += ["the first failure in full", *(f"  {line}" for line in whole.splitlines())]
    return "\n".join(lines)


def pace(trial: DryRunResult) -> str:
    per_second = summary(trial)["calls_per_second"]
    return f"{len(trial.responses)} responses in {trial.seconds:.2f} s, {per_second:g} per second"


def preview(each: ScoredResponse) -> str:
    return f"{each.origin}: {shorten(' '.join(each.response.split()), PREVIEW_CHARS)}"
