"""The entropy filter (SPEC 1.3): only tokens at which the model was uncertain get a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key
from mtrl.algorithms.groups import masked_mean, top_fraction
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class EntropyFilter(Filter):
    """Keeps the tokens at which the old policy had the highest entropy."""

    top_p_entropy_tokens: float = field(default=0.2, metadata={"old_name": "top_p"})
    needs = Needs("entropy")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        return top_fraction(experience.signals.entropy, experience.rollouts.mask, self.top_p_entropy_tokens)

    def metrics(self, experience: Experience) -> dict[str, float]:
        if experience.signals.entropy is None:
            return {}
        mask = experience.rollouts.mask
        chosen = top_fraction(experience.signals.entropy, mask, self.top_p_entropy_tokens)
        return {"actor/entropy_token_fraction": masked_mean(chosen, mask)}
