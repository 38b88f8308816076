"""DyCo-RL (arXiv 2606.08035), by the authors' code of its token-level rule (iclrdyco/dyco, dyco.py): a token whose
attention moves within the image counts by how much of it the image has, one whose attention moves within the text by
how much the text has.

For each token of a response, from the last layer's attention (models/attention_shifts.py):

    role   visual if image_shift - text_shift > tau, text if it is < -tau, else neutral; the first token is neutral
    s_t    image_share of visual tokens, text_share of text tokens, each scaled to 0 .. 1 over the response
    w_t    K softmax(s)_t over the K tokens that are not neutral
    A'_t = A_t (1 + alpha sign(A_t) w_t)      A_t for neutral tokens

Defaults are those of the code: tau 0.05, alpha 0.2; it trains with grpo, a divergence of 0.04 and 4 responses per
prompt. w is below e, so that no factor is negative with an alpha up to 1/e.

Differences from the code: attention is read in the pass of the old log-probs (there: while tokens are sampled); that of
the first token is the attention of the prompt's last position (there: the mean over all positions of the prompt, and
the second token is compared with this mean); the last layer is the last one that has attention; a response without an
image has plain credit (there: an error). The repository that the paper names, Sammy20207109/DyCo-RL, has another rule:
a factor for each response instead of each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_min_max
from mtrl.types import Experience, Needs

LEAST_RANGE = torch.finfo(torch.float64).tiny  # a constant share is 0


@dataclass(frozen=True)
class Dyco(Weight):
    tau: float = 0.05
    alpha: float = 0.2
    needs = Needs("image_share", "text_share", "image_shift", "text_shift")

    def __post_init__(self) -> None:
        if not 0 <= self.tau < math.inf:
            raise ValueError(f"tau is {self.tau}; it must be at least 0")
        if not 0 <= self.alpha <= 1 / math.e:
            raise ValueError(
                f"alpha is {self.alpha}; it must be between 0 and 1/e = 0.367, or a factor can be negative"
            )

    def apply(self, experience: Experience, key: Key) -> Tensor | None:
        signals, mask = experience.signals, experience.rollouts.mask
        if signals.image_shift is None:  # all four are measured, or none
            return None  # no response of this step has an image
        assert signals.text_shift is not None
        assert signals.image_share is not None
        assert signals.text_share is not None
        assert experience.advantage is not None
        later = mask & (mask.cumsum(1) > 1) & experience.rollouts.visual[:, None]
        difference = signals.image_shift - signals.text_shift
        visual, text = later & (difference > self.tau), later & (difference < -self.tau)
        scores = row_min_max(signals.image_share, mask, least=LEAST_RANGE) * visual
        scores = scores + row_min_max(signals.text_share, mask, least=LEAST_RANGE) * text
        active = visual | text
        likely = scores.exp() * active
        weights = active.sum(1, keepdim=True) * likely / likely.sum(1, keepdim=True).clamp(min=1)
        return (1 + self.alpha * experience.advantage.sign() * weights).float()
