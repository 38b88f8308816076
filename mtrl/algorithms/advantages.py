"""Advantage estimators (SPEC 4): rewards r [N] to advantages A [N, T], 0 off the mask, and returns if a critic learns.

The group estimators (grpo, rloo, remax) give every token of a response the same A. The others go token by token: the
reward of a response sits on its last token, a divergence penalty on each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mtrl.algorithms.groups import group_mean, group_sizes, group_std, group_sum, whiten
from mtrl.types import Experience, Needs
from mtrl.utils.errors import RunError
from mtrl.utils.plugin_registry import Registry
from mtrl.utils.user_code import call_user_code, check_shape

Scale = Literal["group", "batch", "none"]
STD_EPSILON = 1e-6


def subtract_penalty(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """r [N] minus each response's penalty, summed over its tokens: how divergence enters the group estimators."""
    return rewards - penalty.double().where(mask, 0.0).sum(1).to(rewards.dtype)


def grpo(rewards: Tensor, group: Tensor, mask: Tensor, scale: Scale = "group", penalty: Tensor | None = None) -> Tensor:
    """(r - mean) / (std + 1e-6) in the group; 0 where the std is 0.

    A penalty [N, T] is taken off r, but the std is that of the rewards without it. In a group of equal rewards it is
    centred and not scaled: the KL of identical responses differs by rounding, which must not become a full advantage.
    """
    charged = rewards if penalty is None else subtract_penalty(rewards, penalty, mask)
    centred = charged - group_mean(charged, group)[group]
    if scale == "none":
        return to_tokens(centred, mask)
    in_group = group_std(rewards, group)[group]
    std = in_group if scale == "group" else group_std(rewards, torch.zeros_like(group))
    return to_tokens(torch.where(in_group > 0, centred / (std + STD_EPSILON), centred), mask)


def rloo(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """r minus the mean of the others in the group; 0 for a single row."""
    others = group_sizes(group)[group] - 1
    mean_of_others = (group_sum(rewards, group)[group] - rewards) / others
    return to_tokens((rewards - mean_of_others).where(others > 0, 0.0), mask)


def remax(rewards: Tensor, mask: Tensor, baseline: Tensor) -> Tensor:
    """r minus the reward of the greedy response to the same prompt, baseline [N]."""
    return to_tokens(rewards - baseline, mask)


def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted returns of token rewards [N, T], whitened over all valid tokens of the batch."""
    returns = torch.zeros_like(token_rewards)
    running = torch.zeros(len(token_rewards))
    for t in reversed(range(token_rewards.shape[1])):
        running = (token_rewards[:, t] + gamma * running).where(mask[:, t], 0.0)
        returns[:, t] = running
    return whiten(returns, mask)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened, and returns = A + V before whitening. V after the last token is 0."""
    advantage = torch.zeros_like(token_rewards)
    next_value = torch.zeros(len(values))
    running = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * lam * running).where(mask[:, t], 0.0)
        next_value = values[:, t].where(mask[:, t], 0.0)
        advantage[:, t] = running
    return whiten(advantage, mask), (advantage + values).where(mask, 0.0)


def token_rewards(rewards: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """[N, T]: each response's reward on its last valid token, minus the per-token penalty."""
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    placed = rewards[:, None].expand(mask.shape).where(last, 0.0)
    return placed if penalty is None else placed - penalty.where(mask, 0.0)


def to_tokens(per_response: Tensor, mask: Tensor) -> Tensor:
    """[N] to every valid token of the row, float32."""
    return per_response.float()[:, None].expand(mask.shape).where(mask, 0.0)


# ------------------------------------------------------------------------------------------------- estimators by name
Estimated = tuple[Tensor, Tensor | None]  # A [N, T]; returns [N, T]


class Estimator(ABC):
    """Estimates advantages; its fields are keys of `optimization` with the same names."""

    needs: ClassVar[Needs] = Needs()  # the signals it reads; "values": a critic is trained on the returns
    needs_baseline: ClassVar[bool] = False  # whether it reads `rewards.baseline`, of a greedy response to each prompt

    @abstractmethod
    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        """A [N, T], 0 off the mask, and the returns [N, T] that a critic learns, if any. `penalty` [N, T] is the
        divergence from the reference, if it is part of the reward."""


def estimate_advantages(estimator: Estimator, experience: Experience, penalty: Tensor | None) -> Estimated:
    """The advantages and returns of an estimator, which may be a user's."""
    what = f"advantage estimator {type(estimator).__name__}"
    result = call_user_code(what, lambda: estimator.estimate(experience, penalty))
    if not isinstance(result, tuple) or len(result) != 2:
        raise RunError(f"{what} returned a {type(result).__name__}, not two: advantages, and returns or None")
    for value in result if "values" in estimator.needs or result[1] is not None else result[:1]:
        check_shape(what, value, experience.rollouts.mask.shape, "one number per response and token, [N, T]")
    return result


@dataclass(frozen=True)
class Grpo(Estimator):
    scale_rewards: Scale = "group"

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        rollouts = experience.rollouts
        total = experience.rewards.total
        return grpo(total, rollouts.group, rollouts.mask, self.scale_rewards, penalty), None


@dataclass(frozen=True)
class Rloo(Estimator):
    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        rollouts = experience.rollouts
        return rloo(penalized_rewards(experience, penalty), rollouts.group, rollouts.mask), None


@dataclass(frozen=True)
class Remax(Estimator):
    needs_baseline = True

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        baseline = experience.rewards.baseline
        assert baseline is not None, "remax compares with greedy responses"
        return remax(penalized_rewards(experience, penalty), experience.rollouts.mask, baseline), None


@dataclass(frozen=True)
class ReinforcePlusPlus(Estimator):
    gamma: float = 1.0

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        mask = experience.rollouts.mask
        rewards = token_rewards(experience.rewards.total, mask, penalty)
        return reinforce_plus_plus(rewards, mask, self.gamma), None


@dataclass(frozen=True)
class Gae(Estimator):
    gamma: float = 1.0
    lam: float = 0.95
    needs = Needs("values")

    def estimate(self, experience: Experience, penalty: Tensor | None) -> Estimated:
        mask, values = experience.rollouts.mask, experience.signals.values
        assert values is not None, "gae needs the critic's values"
        rewards = token_rewards(experience.rewards.total, mask, penalty)
        return gae(rewards, values, mask, self.gamma, self.lam)


ESTIMATORS = Registry[Estimator](
    "advantage estimator",
    (Estimator,),
    {"gae": Gae, "grpo": Grpo, "rloo": Rloo, "remax": Remax, "reinforce_plus_plus": ReinforcePlusPlus},
)


def penalized_rewards(experience: Experience, penalty: Tensor | None) -> Tensor:
    """r [N], less the penalty of all its tokens: how divergence enters the estimators that do not standardise."""
    total = experience.rewards.total
    return total if penalty is None else subtract_penalty(total, penalty, experience.rollouts.mask)
