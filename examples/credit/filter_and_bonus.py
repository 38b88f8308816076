"""A random filter and a bonus by length: the other two kinds of credit rules. Name them in a YAML:

optimization:
  credit:
    - {name: examples/credit/filter_and_bonus.py:RandomFilter, top_p: 0.4}
    - examples/credit/filter_and_bonus.py:Brevity
"""

from dataclasses import dataclass

import numpy as np
import torch

from mtrl import Bonus, Filter
from mtrl.algorithms.groups import group_mean, top_fraction
from mtrl.utils.seeding import rng_for


@dataclass(frozen=True)
class RandomFilter(Filter):
    """Keeps as many tokens as the perception or entropy filter, but at random: a control for both."""

    top_p: float = 0.2

    def apply(self, experience, key):
        mask = experience.rollouts.mask
        # Each row draws by (seed, step, row): a resumed run draws the same, whatever the padding.
        draws = [rng_for("random filter", *key, row).random(mask.shape[1]) for row in range(len(mask))]
        return top_fraction(torch.from_numpy(np.stack(draws)), mask, self.top_p)


@dataclass(frozen=True)
class Brevity(Bonus):
    """Adds strength * (1 - length / mean length of the group) to the advantage, which favours shorter responses."""

    strength: float = 0.1

    def apply(self, experience, key):
        rollouts = experience.rollouts
        length = rollouts.mask.sum(1).double()
        mean_length = group_mean(length, rollouts.group)[rollouts.group].clamp(min=1)
        return (self.strength * (1 - length / mean_length))[:, None].expand(rollouts.mask.shape)

    def metrics(self, experience):
        return {"actor/brevity_bonus": float(self.apply(experience, (0, 0)).abs().mean())}
