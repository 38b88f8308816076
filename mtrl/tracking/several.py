"""Several trackers as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce

from mtrl.protocols import Tracker
from mtrl.tracking.table import ColumnRates, Values
from mtrl.types import Experience, Needs, ValidationSample

logger = logging.getLogger(__name__)


class Trackers(Tracker):
    """Calls each tracker, also after one of them failed: its error ends the run, and the others have their row by then.
    `before` runs before every write and may refuse it with an error."""

    def __init__(self, trackers: Sequence[Tracker], before: Callable[[], None] = lambda: None) -> None:
        self.trackers, self.before = tuple(trackers), before
        self.needs = reduce(Needs.__or__, (tracker.needs for tracker in self.trackers), Needs())

    def metrics(self, step: int, values: Values) -> None:
        self.before()
        self._call_each(lambda tracker: tracker.metrics(step, values))

    def rollouts(self, step: int, experience: Experience) -> None:
        self.before()
        self._call_each(lambda tracker: tracker.rollouts(step, experience))

    def validation(self, step: int, values: Values, by: ColumnRates, samples: Sequence[ValidationSample]) -> None:
        self.before()
        self._call_each(lambda tracker: tracker.validation(step, values, by, samples))

    def close(self) -> None:
        self._call_each(lambda tracker: tracker.close())

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        """Raises the first error; further ones are logged."""
        first: Exception | None = None
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    logger.exception("%s failed too", type(tracker).__name__)
        if first is not None:
            raise first
