"""A trial of a reward function, written out for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mtrl.rewards.dry_run import Trial, TriedReward, ValueSummary, histogram

SHOWN = 5  # how many of the slowest and of the failed responses are listed
BAR = 40  # characters of the longest bar in the histogram
PREVIEW = 60  # characters shown of a response


def report(trial: Trial) -> str:
    blocks = [parts_table(trial), distribution(trial), slowest(trial), failures(trial), pace(trial)]
    return "\n\n".join(block for block in blocks if block)


def summary(trial: Trial) -> dict[str, Any]:
    """The trial as values for JSON, which has no NaN: what does not apply is null."""
    parts = {name: asdict(spread) for name, spread in trial.parts().items()}
    return {
        "function": trial.name,
        "samples": len(trial.tried),
        "failed": len(trial.failed),
        "mean": ValueSummary.of(trial.totals).mean,
        "parts": {name: {key: or_null(value) for key, value in part.items()} for name, part in parts.items()},
        "seconds": round(trial.seconds, 3),
        "calls_per_second": round(len(trial.tried) / max(trial.seconds, 1e-9), 1),
    }


def parts_table(trial: Trial) -> str:
    heads = ("mean", "std", "min", "max")
    lines = [f"{'part':<24}" + "".join(f"{head:>10}" for head in heads) + f"{'n/a':>8}{'failed':>8}"]
    rows = {**trial.parts(), "total": ValueSummary.of(trial.totals)}
    for name, spread in rows.items():
        numbers = (spread.mean, spread.std, spread.min, spread.max)
        cells = "".join(f"{'-' if math.isnan(number) else f'{number:.4f}':>10}" for number in numbers)
        failed = len(trial.failed) if name == trial.name else 0
        lines.append(f"{name:<24}{cells}{spread.absent:>8}{failed:>8}")
    return "\n".join(lines)


def distribution(trial: Trial) -> str:
    bins = histogram(trial.totals)
    most = max(count for _, _, count in bins)
    lines = ["total"]
    for low, high, count in bins:
        label = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        lines.append(f"  {label:>22}  {'#' * math.ceil(BAR * count / most):<{BAR}} {count}")
    return "\n".join(lines)


def slowest(trial: Trial) -> str:
    lines = [f"{1000 * each.outcome.seconds:10.1f} ms  {place(each)}" for each in trial.slowest(SHOWN)]
    return "\n".join(["slowest", *lines]) if lines else ""


def failures(trial: Trial) -> str:
    """The failed responses, each with the last line of its traceback; the first with all of it."""
    if not trial.failed:
        return ""
    counts = f"each counts as failure_reward={trial.failure_reward:g}"
    lines = [f"failed: {len(trial.failed)} of {len(trial.tried)}; {counts}"]
    for each in trial.failed[:SHOWN]:
        lines.append(f"  {place(each)}\n      {last_line(each.outcome.failure)}")
    if len(trial.failed) > SHOWN:
        lines.append(f"  ... and {len(trial.failed) - SHOWN} more")
    first = trial.failed[0].outcome
    whole = "\n".join(text.strip() for text in (first.failure or "", first.output) if text.strip())
    if "\n" in whole:
        lines += ["the first in full", *(f"  {line}" for line in whole.splitlines())]
    return "\n".join(lines)


def pace(trial: Trial) -> str:
    numbers = summary(trial)
    return f"{len(trial.tried)} responses in {trial.seconds:.2f} s, {numbers['calls_per_second']:g} a second"


def place(each: TriedReward) -> str:
    text = " ".join(each.response.split())
    return f"{each.origin}: {text if len(text) <= PREVIEW else text[:PREVIEW] + '...'}"


def last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]


def or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
