"""Weights for attention anchors, after AT-RL (arXiv 2602.11455): the few tokens with the most attention to the image.

    v_t = (boost where t is among the top share by vision mass, else 1), over its mean in the response

`attention_weights` weights every token by its attention; this rule picks out a share of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_mean, top_fraction
from mtrl.algorithms.signals import VISION, segment
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class AttentionAnchors(Weight):
    """v [N, T] with mean 1 over a response. Rows without an image get ones."""

    top_p: float = 0.15
    boost: float = 3.0
    needs = Needs("attention_mass")

    def apply(self, experience: Experience, key: Key) -> Tensor | None:
        mass, rollouts = experience.signals.attention_mass, experience.rollouts
        if mass is None:  # the attention of this model cannot be read
            return None
        anchors = top_fraction(segment(mass, "weight")[..., VISION], rollouts.mask, self.top_p)
        weights = 1 + (self.boost - 1) * anchors.double()
        judged = rollouts.visual[:, None] & rollouts.mask
        return (weights / row_mean(weights, rollouts.mask).clamp(min=1e-12)[:, None]).where(judged, 1.0).float()
