"""Token gradient filtering (SPEC 1.3): only tokens that depend on the image get a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key
from mtrl.algorithms.groups import masked_mean, top_fraction
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class PerceptionFilter(Filter):
    """Keeps the tokens with the highest visual dependency S. It does not apply to responses without an image."""

    top_p_perception_tokens: float = field(default=0.2, metadata={"old_name": "top_p"})
    needs = Needs("dependency")

    def applies_to(self, experience: Experience) -> Tensor:
        return experience.rollouts.visual

    def apply(self, experience: Experience, key: Key) -> Tensor:
        return top_fraction(experience.signals.dependency, experience.rollouts.mask, self.top_p_perception_tokens)

    def metrics(self, experience: Experience) -> dict[str, float]:
        """Share of the kept tokens, and mean S of the kept and the rejected ones."""
        dependency, mask = experience.signals.dependency, experience.rollouts.mask
        seen = mask & experience.rollouts.visual[:, None]
        if dependency is None or not seen.any():
            return {}
        chosen = top_fraction(dependency, mask, self.top_p_perception_tokens) & seen
        weakest = dependency.where(chosen, torch.inf).amin(1)[chosen.any(1)]
        values = {
            "actor/perception_token_fraction": masked_mean(chosen, seen),
            "actor/low_var_kl_mean_selected": masked_mean(dependency, chosen),
            "actor/low_var_kl_threshold": float(weakest.mean()),
        }
        if (rejected := seen & ~chosen).any():
            values["actor/low_var_kl_mean_rejected"] = masked_mean(dependency, rejected)
        return values
