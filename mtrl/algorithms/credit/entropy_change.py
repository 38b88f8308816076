"""Weights by the change of a token's entropy under the perturbed image: a token counts for more if the image makes
the model more, or less, certain of it.

    c_t = H(pi(.|s_t, I')) - H(pi(.|s_t, I))      v_t = clip(1 - strength + strength * |c_t| / mean |c|)

S compares the probability of the sampled token; this compares the certainty of the whole distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import masked_mean, row_mean
from mtrl.types import Experience, Needs

FLAT_MEAN = 1e-6  # nats: smaller mean changes are rounding, and every token keeps weight 1


@dataclass(frozen=True)
class EntropyChange(Weight):
    """v [N, T] with mean 1 over a response before the clip. Rows without an image, or without any change, get ones."""

    strength: float = 1.0  # 0: plain advantages
    clip: tuple[float, float] = (0.2, 3.0)
    needs = Needs("entropy_change")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        change, rollouts = experience.signals.entropy_change, experience.rollouts
        assert change is not None, "the probe did not measure the signal that the rule needs"
        size = change.abs().double()
        mean = row_mean(size, rollouts.mask)[:, None]
        weights = (1 - self.strength + self.strength * size / mean.clamp(min=FLAT_MEAN)).clamp(*self.clip)
        changed = rollouts.visual[:, None] & (mean > FLAT_MEAN) & rollouts.mask
        return weights.where(changed, 1.0).float()

    def metrics(self, experience: Experience) -> dict[str, float]:
        change, seen = experience.signals.entropy_change, experience.rollouts.visual[:, None]
        seen = seen & experience.rollouts.mask
        if change is None or not seen.any():
            return {}
        return {
            "actor/entropy_change_mean": masked_mean(change, seen),
            "actor/entropy_change_size": masked_mean(torch.abs(change), seen),
        }
