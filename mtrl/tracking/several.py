"""Several trackers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtrl.protocols import Tracker
from mtrl.types import Credit, Rewards, Rollouts, Sample, Signals


class Trackers:
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.metrics(step, values)

    def rollouts(self, step: int, rollouts: Rollouts, rewards: Rewards, credit: Credit, signals: Signals) -> None:
        for tracker in self.trackers:
            tracker.rollouts(step, rollouts, rewards, credit, signals)

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[Sample],
    ) -> None:
        for tracker in self.trackers:
            tracker.validation(step, values, by, samples)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
