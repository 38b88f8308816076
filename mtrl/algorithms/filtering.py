"""Online filtering (SPEC 4): which groups of responses a step learns from.

`mean` is EasyR1's filter: it drops prompts that are always or never solved. `spread` is the filter of DAPO's dynamic
sampling: it drops groups whose responses all have the same reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.groups import group_mean, group_std
from mtrl.types import Rewards

OVERALL = "overall"  # the total, among the names of the parts

FilterBy = Literal["mean", "spread"]


@dataclass(frozen=True)
class GroupFilter:
    """Keeps a group if the mean of a reward part lies inside (low, high), or if its values differ. A group that the
    part does not apply to is dropped.

    >>> rewards = Rewards(torch.tensor([1.0, 0.0, 1.0, 1.0]), {}, torch.zeros(4, dtype=torch.bool))
    >>> GroupFilter("spread").keeps(rewards, torch.tensor([0, 0, 1, 1])).tolist()
    [True, False]
    """

    filter_by: FilterBy
    filter_key: str = OVERALL
    filter_low: float = 0.01
    filter_high: float = 0.99

    def keeps(self, rewards: Rewards, group: Tensor) -> Tensor:
        """[P] bool."""
        values = self.values(rewards)
        if self.filter_by == "spread":
            return group_std(values, group) > 0
        mean = group_mean(values, group)
        return (mean > self.filter_low) & (mean < self.filter_high)

    def values(self, rewards: Rewards) -> Tensor:
        """[N]: the reward part, NaN where it does not apply."""
        if self.filter_key == OVERALL:  # even if a function returns a part of that name
            return rewards.total
        return rewards.parts.get(self.filter_key, torch.full_like(rewards.total, torch.nan))

    def describe(self) -> str:
        """The condition that a group must meet, for messages."""
        if self.filter_by == "spread":
            return f"a spread of {self.filter_key}"
        return f"a mean {self.filter_key} in ({self.filter_low}, {self.filter_high})"
