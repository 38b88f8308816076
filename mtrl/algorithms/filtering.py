"""Online filtering (SPEC 4): which groups of responses a step learns from.

`mean` is EasyR1's filter: prompts that are solved always or never go. `spread` is that of DAPO's dynamic sampling:
groups whose responses all earned the same go.
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
    """Keeps a group whose mean of a reward part lies inside (low, high), or whose values of it differ. A group that the
    part does not apply to has nothing to be judged by, and goes.

    >>> rewards = Rewards(torch.tensor([1.0, 0.0, 1.0, 1.0]), {}, torch.zeros(4, dtype=torch.bool))
    >>> GroupFilter("spread").keeps(rewards, torch.tensor([0, 0, 1, 1])).tolist()
    [True, False]
    """

    by: FilterBy
    key: str = OVERALL
    low: float = 0.01
    high: float = 0.99

    def keeps(self, rewards: Rewards, group: Tensor) -> Tensor:
        """[P] bool."""
        values = self.values(rewards)
        if self.by == "spread":
            return group_std(values, group) > 0
        mean = group_mean(values, group)
        return (mean > self.low) & (mean < self.high)

    def values(self, rewards: Rewards) -> Tensor:
        """[N]: the part that counts, NaN where it does not apply."""
        if self.key == OVERALL:  # whatever a function calls so
            return rewards.total
        return rewards.parts.get(self.key, torch.full_like(rewards.total, torch.nan))

    def told(self) -> str:
        """What a group must show, in words for the user."""
        return f"a spread of {self.key}" if self.by == "spread" else f"a mean {self.key} in ({self.low}, {self.high})"
