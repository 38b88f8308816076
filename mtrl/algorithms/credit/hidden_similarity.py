"""Weights by similarity to the image, after PEPO (arXiv 2603.22847) and VGPO (arXiv 2604.09349): a token counts for
more if the hidden state that predicts it is similar to the hidden states of the image.

    c_t = cosine of the last hidden state that predicts t to the mean of the unit last hidden states of the image
    s_t = c_t - min c      v_t = clip(1 - strength + strength * n s_t / sum of s)

It needs no second view of the image, and no gradient flows through it. PEPO mixes c with the entropy, VGPO increases it
along the response; this rule is the common part of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_mean
from mtrl.types import Experience, Needs

FLAT_RANGE = 1e-6  # range of c that rounding alone can make: every token keeps weight 1


@dataclass(frozen=True)
class HiddenSimilarity(Weight):
    """v [N, T] with mean 1 over a response before the clip. Rows without an image, or with one c throughout, get
    ones."""

    strength: float = 1.0  # 0: plain advantages
    clip: tuple[float, float] = (0.2, 3.0)
    needs = Needs("similarity")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        similarity, rollouts = experience.signals.similarity, experience.rollouts
        assert similarity is not None, "the probe did not measure the signal that the rule needs"
        c, mask = similarity.double(), rollouts.mask
        low = c.where(mask, torch.inf).amin(1, keepdim=True)
        width = c.where(mask, -torch.inf).amax(1, keepdim=True) - low
        above = c - low
        weights = (1 - self.strength + self.strength * above / row_mean(above, mask)[:, None]).clamp(*self.clip)
        return weights.where(rollouts.visual[:, None] & (width > FLAT_RANGE) & mask, 1.0).float()
