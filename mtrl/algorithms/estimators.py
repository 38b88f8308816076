"""Estimators by name: each turns the rewards of a step into advantages, and into returns where a critic learns.

The arithmetic stands in `advantages.py`. A penalty [N, T] is what the distance to the reference takes off the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mtrl.algorithms import advantages
from mtrl.types import Experience, Needs

Estimated = tuple[Tensor, Tensor | None]  # A [N, T]; returns [N, T]


class Estimator(Protocol):
    @property
    def needs(self) -> Needs: ...

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated: ...


@dataclass(frozen=True)
class Grpo:
    scale_rewards: advantages.Scale = "group"
    needs = Needs()

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        rollouts = experience.rollouts
        total = experience.rewards.total
        return advantages.grpo(total, rollouts.group, rollouts.mask, self.scale_rewards, penalty), None


@dataclass(frozen=True)
class Rloo:
    needs = Needs()

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        rollouts = experience.rollouts
        return advantages.rloo(penalized_rewards(experience, penalty), rollouts.group, rollouts.mask), None


@dataclass(frozen=True)
class Remax:
    needs = Needs()

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        baseline = experience.rewards.baseline
        assert baseline is not None, "remax compares with greedy responses"
        return advantages.remax(penalized_rewards(experience, penalty), experience.rollouts.mask, baseline), None


@dataclass(frozen=True)
class ReinforcePlusPlus:
    gamma: float = 1.0
    needs = Needs()

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        mask = experience.rollouts.mask
        rewards = advantages.token_rewards(experience.rewards.total, mask, penalty)
        return advantages.reinforce_plus_plus(rewards, mask, self.gamma), None


@dataclass(frozen=True)
class Gae:
    gamma: float = 1.0
    lam: float = 0.95
    needs = Needs("values")

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        mask, values = experience.rollouts.mask, experience.signals.values
        assert values is not None, "gae needs the critic's values"
        rewards = advantages.token_rewards(experience.rewards.total, mask, penalty)
        return advantages.gae(rewards, values, mask, self.gamma, self.lam)


ESTIMATORS: dict[str, type] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "remax": Remax,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "gae": Gae,
}


def penalized_rewards(experience: Experience, penalty: Tensor | None) -> Tensor:
    """r [N], less the penalty of all its tokens: how divergence enters the estimators that do not standardise."""
    total = experience.rewards.total
    return total if penalty is None else advantages.subtract_penalty(total, penalty, experience.rollouts.mask)
