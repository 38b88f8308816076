"""VGPO (arXiv 2604.09349, equations 2 to 12): weights by how close a token's state is to the image, more so late in a
response, and of responses by the sum of them.

c_t is the cosine of the last hidden state at token t to the mean of those of the image, t = 1 .. T:

    r_t = (c_t + 1) / 2         w_t = r_t (1 + beta t / T) where t > (1 - gamma) T and r_t is among the highest kappa of
                                those, else r_t
    v_t = 1 + w~_t - mean of w~                   w~ = (w - min w) / (max w - min w + eps) over the response
    u_i = 1 + s~_i - mean of s~ of the group      s_i = sum of w; s~ the same over the responses to a prompt
    A'_t = A_t v_t u_i

Defaults are the paper's: beta 0.3, gamma 0.5, kappa 0.2.

What the paper leaves open, and our choice: eps is 1e-8; the highest kappa are at least one token, rounded down, and
ties of the last one are among them, as in the authors' code; states are those before the updates of a step.
Differences from the authors' code (wzb-bupt/VGPO): there r is c scaled by the lowest and highest value of a
micro-batch, t / T is (t - 1) / (T - 1), factors are held within 0.1 to 2 and 0.9 to 2, s sums w~, and groups are
consecutive rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import group_count, group_mean, row_mean, row_min_max
from mtrl.types import Experience, Needs

EPS = 1e-8


@dataclass(frozen=True)
class Vgpo(Weight):
    """[N, T]; 1 without an image."""

    beta: float = 0.3
    gamma: float = 0.5
    kappa: float = 0.2
    needs = Needs("token_similarity")

    def apply(self, experience: Experience, key: Key) -> Tensor:
        similarity, rollouts = experience.signals.token_similarity, experience.rollouts
        assert similarity is not None, "the probe did not measure the signal that the rule needs"
        weights, mask = self._raise_late(similarity.double(), rollouts.mask), rollouts.mask
        scaled = row_min_max(weights, mask, EPS)
        of_tokens = 1 + scaled - row_mean(scaled, mask)[:, None]
        score = weights.where(mask, 0.0).sum(1).where(mask.any(1), torch.nan)
        of_responses = 1 + centre(score, rollouts.group)
        return (of_tokens * of_responses[:, None]).where(rollouts.visual[:, None] & mask, 1.0).float()

    def _raise_late(self, cosine: Tensor, mask: Tensor) -> Tensor:
        """w [N, T]"""
        level, length = (cosine + 1) / 2, mask.sum(1, keepdim=True)
        number = mask.cumsum(1)
        late = mask & (number > (1 - self.gamma) * length)
        count = (late.sum(1, keepdim=True) * self.kappa + 1e-6).floor().long().clamp(min=1)
        ordered = level.where(late, -torch.inf).sort(dim=1, descending=True).values
        chosen = late & (level >= ordered.gather(1, count - 1))
        return level * (1 + chosen * self.beta * number / length)


def centre(score: Tensor, group: Tensor) -> Tensor:
    """[N]: scores over the range of their group, minus the mean of these; NaN are left out."""
    low, high = (
        torch.full((group_count(group),), fill, dtype=score.dtype).scatter_reduce(0, group, score.nan_to_num(fill), how)
        for fill, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    scaled = score / (high - low + EPS)[group]
    return scaled - group_mean(scaled, group)[group]
