"""Your own policy loss: a squared penalty instead of a clip. Name it in a YAML:

optimization:
  policy_loss: {name: examples/losses/quadratic.py:Quadratic, strength: 10.0}
"""

from dataclasses import dataclass

import mtrl


@dataclass(frozen=True)
class Quadratic(mtrl.PolicyLoss):
    """-ratio * A + strength * (ratio - 1)^2: the further the policy is from the sampling one, the stronger it is pulled
    back. The fields of PolicyLoss (importance_sampling_level, clip_ratio_low, ..) have the values of their keys."""

    strength: float = 10.0

    def term(self, ratio, logp, advantage):
        return -ratio * advantage + self.strength * (ratio - 1) ** 2
