"""PGPO (arXiv 2604.01840, equations 4 to 8): weights by how much a token's probability depends on the image.

The second view has the same tokens, and none attends to those of the image: x_t = log pi(y_t | none) - log pi(y_t | I).

    S_t = exp(x_t) - 1 - x_t                    u_t = log(1 + S_t)
    I_t = (u_t - min u) / (max u - min u + eps)          over the response
    w_t = I_t / (tau + eps) if I_t < tau, else 1 + beta (I_t - tau) / (1 - tau + eps)
    A'_t = A_t n w_t / sum of w                          n the tokens of the response

Defaults are the paper's: tau 0.4, beta 2. It trains with the recipe of DAPO: clip 0.2 and 0.28, the mean over all valid
tokens, no divergence.

What the paper leaves open, and our choice: eps is 1e-8; where all S are equal, as for a response without an image, all
weights are 1; S is measured before the updates of a step, and |x| is at most 20.
Differences from the authors' development code, as others describe it: there tau is a quantile of I, weights below it
are at least 0.1, and they are not rescaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_mean, row_min_max
from mtrl.algorithms.signals import low_var_kl
from mtrl.types import Experience, Needs

EPS = 1e-8
BLIND = "logprobs@none"


@dataclass(frozen=True)
class Pgpo(Weight):
    """[N, T] with mean 1 over a response."""

    tau: float = 0.4
    beta: float = 2.0
    needs = Needs("old_logprobs", BLIND)

    def apply(self, experience: Experience, key: Key) -> Tensor:
        signals, rollouts = experience.signals, experience.rollouts
        assert signals.old_logprobs is not None, "the probe did not measure the signal that the rule needs"
        surprise = low_var_kl((signals.extra[BLIND] - signals.old_logprobs).double()).log1p()
        level = row_min_max(surprise, rollouts.mask, EPS)
        raised = 1 + self.beta * (level - self.tau) / (1 - self.tau + EPS)
        weights = torch.where(level < self.tau, level / (self.tau + EPS), raised)
        mean = row_mean(weights, rollouts.mask)[:, None]
        judged = rollouts.visual[:, None] & rollouts.mask & (mean > 0)
        return (weights / mean).where(judged, 1.0).float()
