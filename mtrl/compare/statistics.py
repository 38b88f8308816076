"""What can be said of runs that differ in their configuration and share their seeds.

Seeds are the sample: an interval of a mean comes from drawing seeds anew, a comparison from the differences of runs of
the same seed, which have seen the same prompts in the same order and the same responses in their first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtrl.utils.seeding import rng_for

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, and its interval where there are two values at least."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Paired:
    """Differences to the baseline. `p`: of the paired t-test, None where it cannot be had; `adjusted`: after Holm."""

    difference: MeanEstimate
    seeds: int
    p: float | None
    adjusted: float | None = None


@dataclass(frozen=True)
class Discordant:
    """Questions that one of two runs of the same seed got right, over all seeds, and McNemar's exact p."""

    gained: int
    lost: int
    p: float


def estimate(values: Sequence[float]) -> MeanEstimate:
    """The mean of values of single seeds, with its percentile bootstrap interval."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2:
        return MeanEstimate(float(sample.mean()))
    drawn = rng_for("bootstrap", len(sample)).integers(0, len(sample), (RESAMPLES, len(sample)))
    low, high = np.quantile(sample[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return MeanEstimate(float(sample.mean()), float(low), float(high))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Runs of the same seeds, each less the baseline's; None where they share no seed."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [values[seed] - baseline[seed] for seed in seeds]
    return Paired(estimate(differences), len(seeds), paired_p(differences))


def paired_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test. Without spread there is none: all alike, or a single pair."""
    if len(differences) < 2 or np.ptp(differences) < 1e-12:
        return None
    from scipy.stats import ttest_1samp  # not needed by anything else: pip install 'mtrl[compare]'

    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """p values after Holm's correction: the smallest times their number, the next times one less, never falling.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = highest
    return adjusted


def mcnemar(right: Mapping[str, bool], baseline: Mapping[str, bool]) -> Discordant | None:
    """Two runs on the same questions, by their ids (with their seed, where there are several); none without such."""
    shared = right.keys() & baseline.keys()
    if not shared:
        return None
    gained = sum(right[each] and not baseline[each] for each in shared)
    lost = sum(baseline[each] and not right[each] for each in shared)
    if not gained + lost:
        return Discordant(0, 0, 1.0)
    from scipy.stats import binomtest

    return Discordant(gained, lost, float(binomtest(gained, gained + lost).pvalue))


def area(points: Sequence[tuple[float, float]]) -> float:
    """The mean height of a curve: the area under it, over its length.

    >>> area([(0, 0.0), (2, 1.0), (4, 1.0)])
    0.75
    """
    x, y = np.asarray(points, dtype=float).T
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(y[-1])
