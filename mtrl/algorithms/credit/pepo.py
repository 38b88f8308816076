"""PEPO (arXiv 2603.22847), by the authors' code (xzxxntxdy/PEPO, grpo_trainer.py): weights by how close a token's
states are to those of the image, through a gate by this and the entropy.

h are the embeddings and the states of all layers, the last ones after the final norm, H_t the entropy of the
distribution that predicts token t; t and the means of m are over the n tokens of a response, j over its image tokens:

    v_t = mean over layers of mean over j of cos(h_t, h_j)
    m_t = v~_t + H~_t                      x~ = (x - min x) / max(max x - min x, 1e-6)
    g_t = 1 + alpha tanh(m_t - mean of m)
    w_t = n softmax(v g / temperature)_t
    A'_t = A_t (1 - lambda + lambda w_t)   lambda = min(1, step / steps of the run), from 0; 1 without `schedule`

Defaults are those of the authors' script: alpha 0.05, temperature 1.8 (the code's own: 1). PEPO_G trains it with GRPO's
mean of the tokens of each response, PEPO_D with DAPO's.

Differences from the code: weights are measured once, before the updates of a step, and have no gradient (there: in each
update, with a gradient through v and H into the model); a response without an image has weights of 1 (there: v is the
similarity to all of its own tokens but the first, those of the prompt among them); tokens of videos count as those of
images; H is without the tokens that a response cannot have; a step is one of rollouts (there: of the optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, RunFacts, Weight
from mtrl.algorithms.groups import row_mean, row_min_max
from mtrl.types import Experience, Needs

LEAST_RANGE = 1e-6


@dataclass(frozen=True)
class Pepo(Weight):
    """[N, T] with mean 1 over a response."""

    alpha: float = 0.05
    temperature: float = 1.8
    schedule: bool = True
    needs = Needs("layer_similarity", "entropy")
    total_steps: ClassVar[int | None] = None  # set by bind

    def bind(self, run: RunFacts) -> Pepo:
        bound = replace(self)
        object.__setattr__(bound, "total_steps", run.total_steps)
        return bound

    def apply(self, experience: Experience, key: Key) -> Tensor:
        signals, rollouts = experience.signals, experience.rollouts
        similarity, entropy, mask = signals.layer_similarity, signals.entropy, rollouts.mask
        assert similarity is not None and entropy is not None, "the probe did not measure a signal that the rule needs"
        level = row_min_max(similarity, mask, least=LEAST_RANGE) + row_min_max(entropy, mask, least=LEAST_RANGE)
        gate = 1 + self.alpha * torch.tanh(level - row_mean(level, mask)[:, None])
        score = (similarity * gate / self.temperature).where(mask, -torch.inf)
        weights = mask.sum(1, keepdim=True) * score.softmax(1)
        share = self._share(key[1])
        return (1 - share + share * weights).where(rollouts.visual[:, None] & mask, 1.0).float()

    def _share(self, step: int) -> float:
        """lambda"""
        if not self.schedule:
            return 1.0
        assert self.total_steps is not None, "bind was not called"
        return min(1.0, step / self.total_steps)
