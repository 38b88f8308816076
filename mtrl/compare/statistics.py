"""Statistics of runs that differ in their configuration and share their seeds.

The seeds are the sample: the interval of a mean comes from resampling seeds, a comparison from the differences between
runs of the same seed, which see the same prompts in the same order and the same responses in their first step.
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
    """A mean, with its interval if there are at least two values."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Paired:
    """Differences to the baseline. `p`: of the paired t-test, None if undefined; `adjusted`: p after Holm."""

    difference: MeanEstimate
    seeds: int
    p: float | None
    adjusted: float | None = None


@dataclass(frozen=True)
class Discordant:
    """Questions that only one of two runs of the same seed answered correctly, over all seeds; McNemar's exact p."""

    gained: int
    lost: int
    p: float


def estimate(values: Sequence[float]) -> MeanEstimate:
    """The mean over seeds with its percentile bootstrap interval."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2:
        return MeanEstimate(float(sample.mean()))
    drawn = rng_for("bootstrap", len(sample)).integers(0, len(sample), (RESAMPLES, len(sample)))
    low, high = np.quantile(sample[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return MeanEstimate(float(sample.mean()), float(low), float(high))


def compare_paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Compare values with the baseline's values of the same seeds; None if they share no seed."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [values[seed] - baseline[seed] for seed in seeds]
    return Paired(estimate(differences), len(seeds), paired_p(differences))


def paired_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test; None if all differences are equal or there is only one."""
    if len(differences) < 2 or np.ptp(differences) < 1e-12:
        return None
    from scipy.stats import ttest_1samp  # optional dependency: pip install 'mtrl[compare]'

    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """p values after Holm's correction: the smallest times their number, the next times one less, and so on; monotone.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def mcnemar(correct: Mapping[str, bool], baseline: Mapping[str, bool]) -> Discordant | None:
    """Compare the answers to the same questions, by id; None if there are no common questions."""
    shared = correct.keys() & baseline.keys()
    if not shared:
        return None
    gained = sum(correct[each] and not baseline[each] for each in shared)
    lost = sum(baseline[each] and not correct[each] for each in shared)
    if not gained + lost:
        return Discordant(0, 0, 1.0)
    from scipy.stats import binomtest

    return Discordant(gained, lost, float(binomtest(gained, gained + lost).pvalue))


def area(points: Sequence[tuple[float, float]]) -> float:
    """The mean height of a curve: the area under it divided by its length.

    >>> area([(0, 0.0), (2, 1.0), (4, 1.0)])
    0.75
    """
    x, y = np.asarray(points, dtype=float).T
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(y[-1])
