"""How long the rest of a run takes. By a clock that nobody can set back."""

from __future__ import annotations

import time
from collections import deque

RECENT_STEPS = 20
RECENT_VALIDATIONS = 3


class Pace:
    """Steps and validations as they come; a run that goes on may begin at any step. `validate_every` as in the
    configuration: -1 is only at the end."""

    def __init__(self, total_steps: int, validate_every: int) -> None:
        self.total, self.validate_every = total_steps, validate_every
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._validations: deque[float] = deque(maxlen=RECENT_VALIDATIONS)
        self._mark: float | None = None

    def step(self, seconds: float) -> None:
        """A step took `seconds` by its own clock; what lies between steps, as saving a checkpoint, is added."""
        now = time.monotonic()
        self._steps.append(seconds if self._mark is None else now - self._mark)
        self._mark = now

    def validation(self, seconds: float) -> None:
        self._validations.append(seconds)
        if self._mark is not None:
            self._mark = time.monotonic()

    def left(self, step: int) -> float:
        """Seconds that are left after `step`; what has not been seen yet counts nothing."""
        return (self.total - step) * mean(self._steps) + self.validations_left(step) * mean(self._validations)

    def validations_left(self, step: int) -> int:
        """Validations still to come: at every multiple of `validate_every` and at the end, with the one of `step`."""
        if self.validate_every < 1:
            return 1
        return (self.total - 1) // self.validate_every - (step - 1) // self.validate_every + 1


def mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def as_clock(seconds: float) -> str:
    """
    >>> as_clock(75), as_clock(9990)
    ('1:15', '2:46:30')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
