"""Estimates how long the rest of a run takes, by a monotonic clock."""

from __future__ import annotations

import time
from collections import deque

RECENT_STEPS = 20
RECENT_VALIDATIONS = 3


class Pace:
    """The durations of recent steps and validations. A resumed run may start at any step. `val_freq` as in the
    configuration: -1 validates only at the end."""

    def __init__(self, total_steps: int, val_freq: int) -> None:
        self.total, self.val_freq = total_steps, val_freq
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._validations: deque[float] = deque(maxlen=RECENT_VALIDATIONS)
        self._last: float | None = None  # end of the last step or validation

    def step(self, seconds: float) -> None:
        """Add a step of `seconds` and the time since the previous step, such as saving a checkpoint."""
        now = time.monotonic()
        self._steps.append(seconds if self._last is None else now - self._last)
        self._last = now

    def validation(self, seconds: float) -> None:
        self._validations.append(seconds)
        if self._last is not None:
            self._last = time.monotonic()

    def seconds_left(self, step: int) -> float:
        """Seconds left after `step`; phases without a measurement yet count 0."""
        return (self.total - step) * mean(self._steps) + self.validations_left(step) * mean(self._validations)

    def validations_left(self, step: int) -> int:
        """Remaining validations including that of `step`: at every multiple of `val_freq` and at the end."""
        if self.val_freq < 1:
            return 1
        return (self.total - 1) // self.val_freq - (step - 1) // self.val_freq + 1


def mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(75), format_duration(9990)
    ('1:15', '2:46:30')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
