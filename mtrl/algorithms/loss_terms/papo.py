"""PAPO (arXiv 2507.06448), by the authors' code (MikeWangWZHL/PAPO, dp_actor.py and core_algos.py): the policy should
differ from itself under a masked image.

    x_t = log pi_old(y_t | masked) - log pi(y_t | I)          |x| at most 20
    loss_t = -gamma min(exp(x_t) - 1 - x_t, 10) - entropy_coef log pi(y_t | I)
                                                - masked_entropy_coef log pi(y_t | masked)

The log-probs under the masked image are measured before the updates of a step, so gradients flow through the clean ones
alone; this is the code's default (RECOMPUTE_AUG_LOG_PROBS false). With `both_views` each pass of the update computes
them anew, and gradients flow through both, as the paper's Eq. 2 has it and as the code has it with that switch on. The
coefficients penalize the sampled estimates of the entropies; that of the masked view has a gradient with `both_views`
alone.

PAPO-G is this beside grpo: gamma 0.01 or 0.02, clip 0.2 and 0.3, a divergence of 0.01. PAPO-D is this beside DAPO:
gamma 0.01, entropy_coef 0.03, clip 0.2 and 0.28, dynamic sampling, no divergence. The masked image is the run's
perturbation with `black_prob: 0.6`.

Differences from the code: the image is masked as the model sees it (there: before it is resized); the mean is over the
tokens of the optimizer step, as in its newer branch; a response without an image has only the entropy term (there: all
or no rows of a batch have the first one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.losses import LossTerm
from mtrl.algorithms.signals import low_var_kl
from mtrl.types import Needs

LIMIT = 10.0
BEFORE, LIVE = "perturbed_logprobs", "logprobs@perturbed"  # measured before the updates, or in them


@dataclass(frozen=True)
class Papo(LossTerm):
    gamma: float = 0.01
    entropy_coef: float = 0.0
    masked_entropy_coef: float = 0.0
    both_views: bool = False

    def __post_init__(self) -> None:
        if self.masked_entropy_coef and not self.both_views:
            raise ValueError("masked_entropy_coef has a gradient with both_views=true alone")

    @property
    def needs(self) -> Needs:
        return Needs() if self.both_views else Needs(BEFORE)

    @property
    def live_needs(self) -> Needs:
        return Needs(LIVE) if self.both_views else Needs()

    def term(self, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        masked, visual = signals[LIVE if self.both_views else BEFORE], signals["visual"]
        difference = self.gamma * low_var_kl(masked - logp).clamp(max=LIMIT)
        of_masked = (difference + self.masked_entropy_coef * masked).where(visual, 0.0)
        return -of_masked - self.entropy_coef * logp
