"""Weights by visual dependency with a gate: tokens that hardly depend on the image get no weight, and the others share
theirs. (`pgpo` is the published rule of this kind.)

    g_t = S_t where S_t >= threshold * mean S, else 0      v_t = 1 - strength + strength * n * g_t / sum of g

The weights of a response sum to its n tokens: credit moves between tokens, none is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_mean
from mtrl.algorithms.signals import DEPENDENCY_NOISE
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class MassGate(Weight):
    """v [N, T] with mean 1 over a response. Rows without an image, or whose S is rounding, get ones."""

    threshold: float = 1.0  # as a multiple of the mean S of the response
    strength: float = 1.0  # 0: plain advantages
    needs = Needs("dependency")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        dependency, rollouts = experience.signals.dependency, experience.rollouts
        assert dependency is not None, "the probe did not measure the signal that the rule needs"
        mean = row_mean(dependency, rollouts.mask)[:, None]
        gated = dependency.double().where(rollouts.mask & (dependency >= self.threshold * mean), 0.0)
        share = row_mean(gated, rollouts.mask)[:, None]
        judged = rollouts.visual[:, None] & (share > DEPENDENCY_NOISE) & rollouts.mask
        weights = 1 - self.strength + self.strength * gated / share
        return weights.where(judged, 1.0).float()
