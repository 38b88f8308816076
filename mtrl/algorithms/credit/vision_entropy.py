"""Visual dependency times entropy: a token counts if it depends on the image and the model was uncertain. (`vepo` is
the published rule of this kind.)

    s_t = (S_t / max S) * (H_t / max H)      maxima over the response

`VisionEntropy` keeps the tokens with the highest s; `VisionEntropyWeights` weights by it, n s_t / sum of s.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Filter, Key, Weight
from mtrl.algorithms.groups import masked_mean, row_mean, top_fraction
from mtrl.algorithms.signals import DEPENDENCY_NOISE, ENTROPY_NOISE
from mtrl.types import Experience, Needs

TINY = 1e-12


@dataclass(frozen=True)
class VisionEntropy(Filter):
    """Does not apply to responses without an image."""

    top_p: float = 0.2
    needs = Needs("dependency", "entropy")

    def applies_to(self, experience: Experience) -> Tensor:
        return experience.rollouts.visual

    def apply(self, experience: Experience, key: Key) -> Tensor:
        return top_fraction(vision_entropy(experience), experience.rollouts.mask, self.top_p)

    def metrics(self, experience: Experience) -> dict[str, float]:
        seen = experience.rollouts.mask & experience.rollouts.visual[:, None]
        if experience.signals.dependency is None or not seen.any():
            return {}
        return {"actor/vision_entropy_token_fraction": masked_mean(self.apply(experience, (0, 0)), seen)}


@dataclass(frozen=True)
class VisionEntropyWeights(Weight):
    """v [N, T] with mean 1 over a response before the clip. Rows without an image get ones, and so do rows in which no
    token has both S and H above what rounding can make: their s would rank rounding errors."""

    clip: tuple[float, float] = (0.2, 3.0)
    needs = Needs("dependency", "entropy")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        score, rollouts, signals = vision_entropy(experience), experience.rollouts, experience.signals
        assert signals.dependency is not None and signals.entropy is not None
        mean = row_mean(score, rollouts.mask)[:, None]
        above_noise = (signals.dependency > DEPENDENCY_NOISE) & (signals.entropy > ENTROPY_NOISE) & rollouts.mask
        judged = rollouts.visual[:, None] & above_noise.any(1, keepdim=True) & rollouts.mask
        return (score / mean).clamp(*self.clip).where(judged, 1.0).float()


def vision_entropy(experience: Experience) -> Tensor:
    """s [N, T], float64."""
    signals, mask = experience.signals, experience.rollouts.mask
    assert signals.dependency is not None and signals.entropy is not None, (
        "the probe did not measure the signals that the rule needs"
    )
    return over_maximum(signals.dependency, mask) * over_maximum(signals.entropy, mask)


def over_maximum(x: Tensor, mask: Tensor) -> Tensor:
    """x [N, T] over its highest value in each row; 0 where that is 0, and off the mask."""
    kept = x.double().where(mask, 0.0)
    return kept / kept.amax(1, keepdim=True).clamp(min=TINY)
