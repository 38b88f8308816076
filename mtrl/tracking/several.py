"""Several trackers as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtrl.protocols import Tracker
from mtrl.types import Credit, Rewards, Rollouts, Sample, Signals


class Trackers:
    """`before` may refuse each write, with an error."""

    def __init__(self, trackers: Sequence[Tracker], before: Callable[[], None] = lambda: None) -> None:
        self.trackers, self.before = tuple(trackers), before

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.metrics(step, values)

    def rollouts(self, step: int, rollouts: Rollouts, rewards: Rewards, credit: Credit, signals: Signals) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.rollouts(step, rollouts, rewards, credit, signals)

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[Sample],
    ) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.validation(step, values, by, samples)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
