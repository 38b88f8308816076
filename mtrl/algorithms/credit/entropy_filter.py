"""The entropy filter (SPEC 1.3): only tokens at which the model was uncertain get a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key
from mtrl.algorithms.groups import masked_mean, top_fraction
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class EntropyFilter(Filter):
    """Keeps the tokens at which the old policy had the highest entropy."""

    top_p: float = 0.2
    needs = Needs("entropy")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        return top_fraction(experience.signals.entropy, experience.rollouts.mask, self.top_p)

    def metrics(self, experience: Experience) -> dict[str, float]:
        if experience.signals.entropy is None:
            return {}
        mask = experience.rollouts.mask
        chosen = top_fraction(experience.signals.entropy, mask, self.top_p)
        return {"actor/entropy_token_fraction": masked_mean(chosen, mask)}
