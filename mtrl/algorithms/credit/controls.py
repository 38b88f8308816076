"""Control filters, which should not help: they show what a filter does by its size alone.

`RandomFilter` keeps a random share of the tokens; `Bottom` keeps those that depend least on the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key
from mtrl.algorithms.groups import top_fraction
from mtrl.types import Experience, Needs
from mtrl.utils.seeding import rng_for


@dataclass(frozen=True)
class RandomFilter(Filter):
    """Keeps as many tokens of each response with an image as `perception_filter` would, chosen at random."""

    top_p: float = 0.2

    def applies_to(self, experience: Experience) -> Tensor:
        return experience.rollouts.visual

    def apply(self, experience: Experience, key: Key) -> Tensor:
        mask = experience.rollouts.mask
        score = torch.zeros(mask.shape, dtype=torch.float64)
        for row, valid in enumerate(mask):  # keyed by row, so that a draw does not depend on other rows
            rng = rng_for("random filter", *key, row)
            score[row, valid] = torch.from_numpy(rng.random(int(valid.sum())))
        return top_fraction(score, mask, self.top_p)


@dataclass(frozen=True)
class Bottom(Filter):
    """Keeps the tokens with the lowest visual dependency S."""

    top_p: float = 0.2
    needs = Needs("dependency")

    def applies_to(self, experience: Experience) -> Tensor:
        return experience.rollouts.visual

    def apply(self, experience: Experience, key: Key) -> Tensor:
        dependency = experience.signals.dependency
        return top_fraction(None if dependency is None else -dependency, experience.rollouts.mask, self.top_p)
