"""Score recorded responses with a reward function, without a model: its values, failures and speed."""

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
class ScoredResponse:
    origin: str  # file and row
    response: str
    outcome: Outcome


@dataclass(frozen=True)
class ValueSummary:
    """Statistics of the values of a part, over the responses it applies to; NaN if there are none.

    >>> ValueSummary.from_values([1.0, 0.0, NAN])
    ValueSummary(mean=0.5, std=0.5, min=0.0, max=1.0, absent=1)
    """

    mean: float
    std: float  # population standard deviation (ddof 0)
    min: float
    max: float
    absent: int  # responses it does not apply to

    @classmethod
    def from_values(cls, values: Sequence[float]) -> ValueSummary:
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(NAN, NAN, NAN, NAN, len(values))
        return cls(statistics.fmean(known), statistics.pstdev(known), min(known), max(known), len(values) - len(known))


@dataclass(frozen=True)
class DryRunResult:
    name: str
    responses: tuple[ScoredResponse, ...]
    seconds: float  # wall time, with all processes
    failure_reward: float = 0.0

    @property
    def failed(self) -> list[ScoredResponse]:
        return [each for each in self.responses if each.outcome.failure]

    @property
    def totals(self) -> list[float]:
        """The totals of a run: the value, the failure reward, or 0 if the function does not apply."""
        rewards = [self.failure_reward if each.outcome.failure else each.outcome.value for each in self.responses]
        return [0.0 if reward is None else reward for reward in rewards]

    def parts(self) -> dict[str, ValueSummary]:
        """Summarize the function's value and each extra number, over the responses that did not fail."""
        outcomes = [each.outcome for each in self.responses if not each.outcome.failure]
        parts = {self.name: ValueSummary.from_values([logged_number(outcome.value) for outcome in outcomes])}
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome.extras):
            summary = ValueSummary.from_values([logged_number(outcome.extras.get(name)) for outcome in outcomes])
            if summary.absent < len(outcomes):  # not a text or a list
                parts.setdefault(name, summary)
        return parts

    def slowest(self, count: int) -> list[ScoredResponse]:
        """Return the slowest timed responses; built-ins and calls that ended their process have no time."""
        timed = [each for each in self.responses if each.outcome.seconds]
        return sorted(timed, key=lambda each: -each.outcome.seconds)[:count]


def score_recorded(
    name: str,
    function: RewardFunction,
    recorded: Iterable[Rollouts],
    describe: Callable[[Rollouts], Sequence[Sample]] = make_samples,
    failure_reward: float = 0.0,
) -> DryRunResult:
    """Score batch after batch, with whole groups, as a run does. `describe` makes the samples. There are no signals of
    recorded responses, so a function that asks for them gets an empty dict."""
    no_signals = {"signals": dict[str, Any]()} if function.needs else {}
    responses: list[ScoredResponse] = []
    seconds = 0.0
    for rollouts in recorded:
        group = rollouts.group.tolist()
        samples = [{**sample, **no_signals} for sample in describe(rollouts)]
        begin = time.perf_counter()
        outcomes = [future.result() for future in function.submit(samples, group)]
        seconds += time.perf_counter() - begin
        origins = [rollouts.prompts[g].task.origin for g in group]
        responses += map(ScoredResponse, origins, rollouts.text, outcomes)
    return DryRunResult(name, tuple(responses), seconds, failure_reward)


def histogram(values: Sequence[float], max_bins: int = 12) -> list[tuple[float, float, int]]:
    """Return bins (low, high, count): one per value if there are few different ones, else of equal width.

    >>> histogram([0.0, 1.0, 1.0])
    [(0.0, 0.0, 1), (1.0, 1.0, 2)]
    """
    different = sorted(set(values))
    if len(different) <= max_bins:
        return [(value, value, values.count(value)) for value in different]
    low, width = different[0], (different[-1] - different[0]) / max_bins
    counts = [0] * max_bins
    for value in values:
        counts[min(max_bins - 1, int((value - low) / width))] += 1
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]
