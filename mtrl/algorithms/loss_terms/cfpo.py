"""CFPO (arXiv 2606.23206), by the authors' code (Raven-July/CFPO: qwen2_vl_cmve.py, dp_actor.py, core_algos.py): the
policy should differ from itself where its text cannot see what it looks at most in the image.

    x_t = log pi_old(y_t | counterfactual) - log pi(y_t | I)          |x| at most 20
    loss_t = -coef min(exp(x_t) - 1 - x_t, 10) - entropy_coef log pi(y_t | I)

The counterfactual pass reads the original image. In every layer, cells of the attention from later tokens to those of
an image whose weight exceeds the mean by more than `threshold` standard deviations read a mean value instead; the view
`counterfactual(threshold)` (models/counterfactual.py) has this formula. Mean and deviation are over the cells of all
heads and of all tokens after the image, of prompt and response.

The log-probs of this pass are measured before the updates of a step, so gradients flow through the clean ones alone, as
in the code. With `both_views` each pass of the update computes them anew, and gradients flow through both; the code has
no such switch.

CFPO-G is this beside grpo: coef 0.02, clip 0.2 and 0.3, a divergence of 0.01. CFPO-D is this beside DAPO: coef 0.01,
entropy_coef 0.03, clip 0.2 and 0.28, dynamic sampling, no divergence. The threshold of both is 2, the code's "high";
its other ones are 0 ("low"), 1 ("medium") and 3 ("extra").

Differences from the code: attention weights are those of the model, of earlier tokens of the same response, and in
float32. Its padding-free pass, which its scripts use, computes them in bf16 without any mask over all responses of a
micro-batch: later tokens and other responses count, so a result depends on which responses share a pass; its comments
say that these should not count. An image is a run of image tokens, where the code reads Qwen's marks of the beginning
and the end: families that separate the rows or tiles of an image have one such image per row or tile. A response
without an image has only the entropy term; the mean is over the tokens of the optimizer step. What no script of
the authors' two recipes switches on is left out: noise or the mean over text as values, a schedule, a mask or a clip of
the difference, and a penalty on the entropy of the counterfactual pass, which has no gradient.

The paper's own text was not at hand: the formula is that of the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.loss_terms.papo import LIMIT
from mtrl.algorithms.losses import LossTerm
from mtrl.algorithms.signals import low_var_kl
from mtrl.types import COUNTERFACTUAL, Needs


@dataclass(frozen=True)
class Cfpo(LossTerm):
    coef: float = 0.02
    entropy_coef: float = 0.0
    threshold: float = 2.0
    both_views: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 100:
            raise ValueError("threshold is a number of standard deviations, from 0 to below 100")

    @property
    def other(self) -> str:
        """The log-probs of the counterfactual pass."""
        return f"logprobs@{COUNTERFACTUAL}({self.threshold:g})"

    @property
    def needs(self) -> Needs:
        return Needs() if self.both_views else Needs(self.other)

    @property
    def live_needs(self) -> Needs:
        return Needs(self.other) if self.both_views else Needs()

    def term(self, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        difference = low_var_kl(signals[self.other] - logp).clamp(max=LIMIT)
        return -(self.coef * difference).where(signals["visual"], 0.0) - self.entropy_coef * logp
