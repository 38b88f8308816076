"""A filter that draws and a term that counts: the other two kinds of credit rules. Name them in a YAML:

optimization:
  credit:
    - {name: examples/credit/filter_and_term.py:RandomFilter, top_p: 0.4}
    - examples/credit/filter_and_term.py:Brevity
"""

from dataclasses import dataclass

import numpy as np
import torch

from mtrl import Bonus, Filter
from mtrl.algorithms.credit.top_fraction import top_fraction
from mtrl.algorithms.groups import group_mean
from mtrl.utils.seeding import rng_for


@dataclass(frozen=True)
class RandomFilter(Filter):
    """Keeps as many tokens as a filter by perception or entropy, but at random: what those should be compared to."""

    top_p: float = 0.2

    def apply(self, experience, key):
        mask = experience.rollouts.mask
        # Each row draws for itself from (seed, step, row): the same in a resumed run, whatever the padding.
        draws = [rng_for("random filter", *key, row).random(mask.shape[1]) for row in range(len(mask))]
        return top_fraction(torch.from_numpy(np.stack(draws)), mask, self.top_p)


@dataclass(frozen=True)
class Brevity(Bonus):
    """Adds strength * (1 - length / mean length of the group) to the advantage: of two answers, the shorter one."""

    strength: float = 0.1

    def apply(self, experience, key):
        rollouts = experience.rollouts
        length = rollouts.mask.sum(1).double()
        usual = group_mean(length, rollouts.group)[rollouts.group].clamp(min=1)
        return (self.strength * (1 - length / usual))[:, None].expand(rollouts.mask.shape)

    def metrics(self, experience):
        return {"actor/brevity_term": float(self.apply(experience, (0, 0)).abs().mean())}
