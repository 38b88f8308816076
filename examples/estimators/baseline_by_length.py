"""Your own advantage estimator: GRPO whose baseline is the mean reward of responses of similar length. In a YAML:

optimization:
  advantage_estimator: {name: examples/estimators/baseline_by_length.py:ByLength, width: 8}
"""

from dataclasses import dataclass

import torch

import mtrl


@dataclass(frozen=True)
class ByLength(mtrl.Estimator):
    """A = r - the mean r of those responses in the batch whose length differs by at most `width` tokens."""

    width: int = 8

    def estimate(self, experience, penalty):
        mask, rewards = experience.rollouts.mask, experience.rewards.total
        if penalty is not None:  # the divergence per token, if it is part of the reward
            rewards = rewards - penalty.where(mask, 0.0).sum(1)
        length = mask.sum(1)
        near = ((length[:, None] - length[None]).abs() <= self.width).float()
        advantage = rewards - near @ rewards / near.sum(1)
        return torch.where(mask, advantage[:, None], 0.0), None  # the second value: returns, if a critic learns
