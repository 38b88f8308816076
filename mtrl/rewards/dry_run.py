"""Trying a reward function on recorded responses, without a model: what it gives, where it fails, how long it takes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.rewards.outcomes import Outcome, logged_number
from mtrl.rewards.samples import make_samples
from mtrl.rewards.scorer import RewardFunction, Sample
from mtrl.types import Rollouts

NAN = math.nan


@dataclass(frozen=True)
class TriedReward:
    """One response and what became of it."""

    origin: str  # where a person finds it
    response: str
    outcome: Outcome


@dataclass(frozen=True)
class ValueSummary:
    """Statistics of the values of a part. NaN: it does not apply to a response, or to none at all.

    >>> ValueSummary.of([1.0, 0.0, NAN])
    ValueSummary(mean=0.5, std=0.5, min=0.0, max=1.0, absent=1)
    """

    mean: float
    std: float  # standard deviation of the values themselves (ddof 0)
    min: float
    max: float
    absent: int  # responses it does not apply to

    @classmethod
    def of(cls, values: Sequence[float]) -> ValueSummary:
        there = [value for value in values if not math.isnan(value)]
        if not there:
            return cls(NAN, NAN, NAN, NAN, len(values))
        return cls(statistics.fmean(there), statistics.pstdev(there), min(there), max(there), len(values) - len(there))


@dataclass(frozen=True)
class Trial:
    """All responses of a trial. `seconds` is time on the clock, with every process at work."""

    name: str
    tried: tuple[TriedReward, ...]
    seconds: float
    failure_reward: float = 0.0

    @property
    def failed(self) -> list[TriedReward]:
        return [each for each in self.tried if each.outcome.failure]

    @property
    def totals(self) -> list[float]:
        """What a run adds up: the value, the failure reward where it failed, nothing where it does not apply."""
        rewards = [self.failure_reward if each.outcome.failure else each.outcome.value for each in self.tried]
        return [0.0 if reward is None else reward for reward in rewards]

    def parts(self) -> dict[str, ValueSummary]:
        """The function's own value and each number it gave beside it, over the responses that did not fail."""
        fine = [each.outcome for each in self.tried if not each.outcome.failure]
        parts = {self.name: ValueSummary.of([logged_number(outcome.value) for outcome in fine])}
        for name in dict.fromkeys(name for outcome in fine for name in outcome.extras):
            spread = ValueSummary.of([logged_number(outcome.extras.get(name)) for outcome in fine])
            if spread.absent < len(fine):  # texts and lists are no parts
                parts.setdefault(name, spread)
        return parts

    def slowest(self, count: int) -> list[TriedReward]:
        """The slowest responses that were timed: built-ins are not, nor calls that took their process with them."""
        timed = [each for each in self.tried if each.outcome.seconds]
        return sorted(timed, key=lambda each: -each.outcome.seconds)[:count]


def try_on(
    name: str,
    function: RewardFunction,
    recorded: Iterable[Rollouts],
    describe: Callable[[Rollouts], Sequence[Sample]] = make_samples,
    failure_reward: float = 0.0,
) -> Trial:
    """Scores one batch after the other, groups whole, as a run does. `describe` makes the samples. Nobody probed these
    responses, so a function that asks for signals gets none."""
    nothing = {"signals": dict[str, Any]()} if function.needs else {}
    tried: list[TriedReward] = []
    seconds = 0.0
    for rollouts in recorded:
        group = rollouts.group.tolist()
        samples = [{**sample, **nothing} for sample in describe(rollouts)]
        begin = time.perf_counter()
        outcomes = [future.result() for future in function.submit(samples, group)]
        seconds += time.perf_counter() - begin
        origins = [rollouts.prompts[g].task.origin for g in group]
        tried += map(TriedReward, origins, rollouts.text, outcomes)
    return Trial(name, tuple(tried), seconds, failure_reward)


def histogram(values: Sequence[float], most: int = 12) -> list[tuple[float, float, int]]:
    """(from, to, how many). Few different values get a bin each, others bins of equal width.

    >>> histogram([0.0, 1.0, 1.0])
    [(0.0, 0.0, 1), (1.0, 1.0, 2)]
    """
    different = sorted(set(values))
    if len(different) <= most:
        return [(value, value, values.count(value)) for value in different]
    low, width = different[0], (different[-1] - different[0]) / most
    counts = [0] * most
    for value in values:
        counts[min(most - 1, int((value - low) / width))] += 1
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]
