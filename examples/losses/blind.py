"""Your own loss term, beside the policy loss: tokens that are likely without the image, too, lose probability.

optimization:
  loss_terms: [{name: examples/losses/blind.py:Blind, coefficient: 0.02}]
"""

from dataclasses import dataclass

from mtrl import LossTerm, Needs


@dataclass(frozen=True)
class Blind(LossTerm):
    """coefficient * p(token without the image) * log p(token)"""

    coefficient: float = 0.01
    needs = Needs("logprobs@none")

    def term(self, logp, signals):
        return self.coefficient * signals["logprobs@none"].exp() * logp
