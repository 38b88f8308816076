"""Your own signal, a number for each token that the model's pass measures, and a rule that reads it:

optimization:
  signals: [examples/signals/margin.py:Margin]
  credit: [{name: examples/signals/margin.py:Hesitant, top_p: 0.3}]
"""

from dataclasses import dataclass

from mtrl import Filter, Needs, Signal
from mtrl.algorithms.groups import top_fraction


@dataclass(frozen=True)
class Margin(Signal):
    """The gap between the log-probs of the two most likely tokens: small where the model hesitates."""

    name = "margin"

    def measure(self, original, perturbed):
        def gap(log_probs, tokens):  # [C, V] and [C] of a chunk of tokens
            first, second = log_probs.topk(2).values.T
            return first - second

        return original.map_log_probs(gap)


@dataclass(frozen=True)
class Hesitant(Filter):
    """Trains on the tokens with the smallest margin."""

    top_p: float = 0.2
    needs = Needs("margin")

    def apply(self, experience, key):
        return top_fraction(-experience.signals.extra["margin"], experience.rollouts.mask, self.top_p)
