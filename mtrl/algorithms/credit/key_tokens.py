"""A bonus for key tokens: token ids that are in the good responses of a group and not in the bad ones. (`ktae` is the
published rule of this kind.)

Among the responses to one prompt, a and b count the good and the bad ones with the id, c and d those without it:

    phi = (a d - b c) / sqrt((a + b)(c + d)(a + c)(b + d))      b_t = strength * phi of token t

phi is the correlation between having the id and being good, from -1 to 1. It is 0 for an id that all responses have,
and if all responses are good or all are bad.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Key
from mtrl.algorithms.groups import group_count, group_mean
from mtrl.types import Experience


@dataclass(frozen=True)
class KeyTokens(Bonus):
    """b [N, T]. A response is good if its reward is above the mean of its group."""

    strength: float = 0.5

    def apply(self, experience: Experience, key: Key) -> Tensor:
        rollouts, reward = experience.rollouts, experience.rewards.total
        good = reward > group_mean(reward, rollouts.group)[rollouts.group]
        bonus = torch.empty(rollouts.mask.shape, dtype=torch.float64)
        for number in range(group_count(rollouts.group)):
            rows = (rollouts.group == number).nonzero().flatten()
            bonus[rows] = association(rollouts.tokens[rows], rollouts.mask[rows], good[rows])
        return (self.strength * bonus).where(rollouts.mask, 0.0).float()


def association(tokens: Tensor, mask: Tensor, good: Tensor) -> Tensor:
    """phi [n, T] of each token's id in a group of n responses, float64."""
    ids, index = torch.unique(tokens.where(mask, -1), return_inverse=True)
    has = torch.zeros(len(tokens), len(ids), dtype=torch.float64).scatter_(1, index, 1.0)
    a, b = has[good].sum(0), has[~good].sum(0)
    c, d = good.sum() - a, (~good).sum() - b
    spread = ((a + b) * (c + d) * (a + c) * (b + d)).sqrt()
    return ((a * d - b * c) / spread.clamp(min=1.0))[index]  # a spread below 1 is 0, and so is its numerator
