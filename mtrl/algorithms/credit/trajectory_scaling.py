"""Trajectory advantage shaping (SPEC 1.4): responses that depend more on the image count for more."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_mean
from mtrl.algorithms.signals import DEPENDENCY_NOISE
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class TrajectoryScaling(Weight):
    """w [N] from the minimum up to where its mean is 1, or to the maximum (None: no cap). Without an image w is 1."""

    trajectory_scaling_min: float = field(default=0.8, metadata={"old_name": "low"})
    trajectory_scaling_max: float | None = field(default=2.0, metadata={"old_name": "high"})
    needs = Needs("dependency")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        return self.scale(experience.signals.dependency, experience.rollouts.mask, experience.rollouts.visual)

    def scale(self, dependency: Tensor | None, mask: Tensor, visual: Tensor) -> Tensor:
        assert dependency is not None, "trajectory scaling needs S, and the probe did not measure it"
        scored = visual & mask.any(1)
        scale = torch.ones(len(mask), dtype=torch.float64)
        if scored.any():
            score = row_mean(dependency, mask)[scored]
            spread = score.max() - score.min()
            if spread > DEPENDENCY_NOISE:  # else every response keeps scale 1
                u = (score - score.min()) / spread
                scale[scored] = self.trajectory_scaling_min + u * (self._top(u) - self.trajectory_scaling_min)
        return scale.float()

    def _top(self, u: Tensor) -> Tensor:
        """beta_max: the largest w that makes the mean 1, or the cap."""
        top = self.trajectory_scaling_min + (1 - self.trajectory_scaling_min) / u.mean()
        return top if self.trajectory_scaling_max is None else top.clamp(max=self.trajectory_scaling_max)

    def metrics(self, experience: Experience) -> dict[str, float]:
        scored = experience.rollouts.visual & experience.rollouts.mask.any(1)
        if experience.signals.dependency is None or not scored.any():
            return {}
        factors = self.apply(experience, (0, 0)).double()[scored]
        return {
            "actor/scaling_factor_mean": float(factors.mean()),
            "actor/scaling_factor_max": float(factors.max()),
            "actor/scaling_capped": float(factors.mean() < 1 - 1e-6),
        }
