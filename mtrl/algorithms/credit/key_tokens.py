"""A term for key tokens, after KTAE (arXiv 2505.16826): ids that good responses of a group have and bad ones have not.

Of the responses to one prompt, a and b are the good and the bad ones that hold the id, c and d those that do not:

    phi = (a d - b c) / sqrt((a + b)(c + d)(a + c)(b + d))      b_t = strength * phi of token t

phi is the correlation of having the id with being good, from -1 to 1. (KTAE takes Fisher's test and the information
gain; both measure the same table.) An id of all responses, or a group whose responses are all good or all bad, says
nothing: 0.
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
    """b [N, T]. A response is good where its reward is above the mean of its group."""

    strength: float = 0.5

    def apply(self, experience: Experience, key: Key) -> Tensor:
        rollouts, reward = experience.rollouts, experience.rewards.total
        good = reward > group_mean(reward, rollouts.group)[rollouts.group]
        term = torch.empty(rollouts.mask.shape, dtype=torch.float64)
        for number in range(group_count(rollouts.group)):
            rows = (rollouts.group == number).nonzero().flatten()
            term[rows] = association(rollouts.tokens[rows], rollouts.mask[rows], good[rows])
        return (self.strength * term).where(rollouts.mask, 0.0).float()


def association(tokens: Tensor, mask: Tensor, good: Tensor) -> Tensor:
    """phi [n, T] of each token's id in a group of n responses, float64."""
    ids, place = torch.unique(tokens.where(mask, -1), return_inverse=True)
    has = torch.zeros(len(tokens), len(ids), dtype=torch.float64).scatter_(1, place, 1.0)
    a, b = has[good].sum(0), has[~good].sum(0)
    c, d = good.sum() - a, (~good).sum() - b
    spread = ((a + b) * (c + d) * (a + c) * (b + d)).sqrt()
    return ((a * d - b * c) / spread.clamp(min=1.0))[place]  # counts: a spread below 1 is 0, and so is what it divides
