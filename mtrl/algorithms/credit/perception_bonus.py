"""A bonus for perception, after PAPO (arXiv 2507.06448): the policy should differ from itself without the image.

PAPO maximises gamma * k3 of the perturbed view. On fresh responses its gradient is that of an advantage:

    b_t = gamma * (1 - exp(x_t)), x_t = log pi(y_t | I') - log pi(y_t | I)

A token that the perturbed image makes less likely gets up to gamma; one that it makes more likely gets a negative
bonus. At the limit of S its gradient is 0, and so is the bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Key
from mtrl.algorithms.signals import DEPENDENCY_LIMIT, low_var_kl
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class PerceptionBonus(Bonus):
    """b [N, T]. Rows without an image get none."""

    gamma: float = 0.01
    needs = Needs("old_logprobs", "perturbed_logprobs")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        signals, rollouts = experience.signals, experience.rollouts
        old, perturbed = signals.old_logprobs, signals.perturbed_logprobs
        assert old is not None and perturbed is not None, "the probe did not measure the signals that the rule needs"
        change = perturbed - old
        judged = rollouts.visual[:, None] & rollouts.mask & (low_var_kl(change) < DEPENDENCY_LIMIT)
        return (-self.gamma * change.where(judged, 0.0).expm1()).float()
