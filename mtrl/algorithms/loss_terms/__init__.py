"""Additional terms of the actor's loss, by name: what a paper adds to the policy loss beside advantages.

@dataclass(frozen=True)
class Quiet(LossTerm):
    '''Tokens that the perturbed image makes likelier lose probability.'''

    coefficient: float = 0.01
    needs = Needs("perturbed_logprobs")

    def term(self, logp, signals):
        return self.coefficient * (signals["perturbed_logprobs"] - logp.detach()).clamp(min=0) * logp
"""

from __future__ import annotations

from mtrl.algorithms.loss_terms.cfpo import Cfpo
from mtrl.algorithms.loss_terms.papo import Papo
from mtrl.algorithms.losses import LossTerm
from mtrl.utils.plugin_registry import Registry

LOSS_TERMS = Registry[LossTerm]("loss term", (LossTerm,), {"cfpo": Cfpo, "papo": Papo})
