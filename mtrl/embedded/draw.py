"""Random draws of the embedded tasks and their teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mtrl.utils.seeding import rng_for

Choice = TypeVar("Choice")


class Draw:
    """Random draws from a key."""

    def __init__(self, *key: int | str) -> None:
        self.rng = rng_for(*key)

    def one(self, options: Sequence[Choice]) -> Choice:
        return options[int(self.rng.integers(len(options)))]

    def some(self, options: Sequence[Choice], count: int) -> list[Choice]:
        return [options[index] for index in self.rng.permutation(len(options))[:count].tolist()]

    def number(self, low: int, high: int) -> int:
        """Both limits are included."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)
