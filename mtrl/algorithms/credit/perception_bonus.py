"""A bonus for looking, after PAPO (arXiv 2507.06448): the policy shall differ from what it would say without the image.

PAPO maximises gamma * k3 of the perturbed view. On fresh responses the gradient of that is the one of an advantage:

    b_t = gamma * (1 - exp(x_t)), x_t = log pi(y_t | I') - log pi(y_t | I)

A token that the perturbed image makes less likely gets up to gamma, one that it makes more likely loses. Where S is at
its limit its gradient is 0, and so is the term.
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
        assert signals.old_logprobs is not None and signals.perturbed_logprobs is not None, (
            "the probe was not asked for its signals"
        )
        change = signals.perturbed_logprobs - signals.old_logprobs
        judged = rollouts.visual[:, None] & rollouts.mask & (low_var_kl(change) < DEPENDENCY_LIMIT)
        return (-self.gamma * change.where(judged, 0.0).expm1()).float()
