"""Your own credit rule: a frozen dataclass that is a Filter, a Weight or a Bonus. Name it in a YAML:

optimization:
  credit:
    - {name: examples/credit/my_rule.py:EntropyChange, strength: 0.5}
"""

from dataclasses import dataclass

from mtrl import Needs, Weight


@dataclass(frozen=True)
class EntropyChange(Weight):
    """Tokens whose entropy changes with the image count for more: 1 + strength * (|change| / mean - 1), at least 0."""

    strength: float = 1.0
    needs = Needs("entropy_change")  # entropy on the perturbed minus that on the original image

    def apply(self, experience, key):
        mask = experience.rollouts.mask
        size = experience.signals.entropy_change.abs().where(mask, 0.0)
        mean = size.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return (1 + self.strength * (size / mean.clamp(min=1e-6) - 1)).clamp(min=0.0)

    def metrics(self, experience):
        return {"actor/my_mean_weight": float(experience.credit.weights[experience.rollouts.mask].mean())}
