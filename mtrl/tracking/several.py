"""Several trackers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from mtrl.protocols import Tracker
from mtrl.tracking.table import ColumnRates, Values
from mtrl.types import Experience, Needs, ValidationSample


class Trackers(Tracker):
    """Calls each tracker. `before` runs before every write and may refuse it with an error."""

    def __init__(self, trackers: Sequence[Tracker], before: Callable[[], None] = lambda: None) -> None:
        self.trackers, self.before = tuple(trackers), before
        self.needs = reduce(Needs.__or__, (tracker.needs for tracker in self.trackers), Needs())

    def metrics(self, step: int, values: Values) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.metrics(step, values)

    def rollouts(self, step: int, experience: Experience) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.rollouts(step, experience)

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample]) -> None:
        self.before()
        for tracker in self.trackers:
            tracker.validation(step, values, by, samples)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
