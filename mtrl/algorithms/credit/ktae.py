"""KTAE (arXiv 2505.16826), by the authors' code (xiaolizh1/KTAE, compute_key_tokens.py): a bonus for token ids that are
associated with right responses.

For every token id v among the responses to one prompt, right ones with a reward above 0: a of the right and b of the
wrong ones have v, c and d do not; N = a + b + c + d.

    F  = exp(-2 p), p of Fisher's two-sided exact test of a, b, c, d; 0 if p = 1
    IG = information gain of "has v" about "is right", in bits
    h  = asin(sqrt(a / (a + c))) - asin(sqrt(b / (b + d)))
    tf = f (k1 + 1) / (f + k1 (1 - k2 + k2 L / mean L))      f = count of v / L, of right and of wrong responses,
                                                             L their tokens in all, k1 = 2, k2 = 0.5
    K  = (alpha F + beta IG) (h + tf_right / (tf_wrong + 1e-5) - tf_wrong / (tf_right + 1e-5)) / (alpha + beta)
    b_t = 2 strength (sigmoid(K) - 1/2)

Added to the advantage. 0 where all responses to a prompt are right, or all are wrong. Defaults are the authors': alpha
and beta 1, strength 1.

Differences from the code: float64, and in Fisher's test tables as likely as the observed one count among those that are
not more likely even if rounding makes them so (there: float32 without a tolerance); denominators of h have no 1e-10;
no id is left out (there: that of Qwen's padding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.contingency import count_table, fisher_p_value, information_gain
from mtrl.algorithms.credit.rule import Bonus, Key
from mtrl.algorithms.groups import group_count
from mtrl.types import Experience

K1, K2 = 2.0, 0.5
TF_FLOOR = 1e-5


@dataclass(frozen=True)
class Ktae(Bonus):
    """b [N, T], within -strength .. strength."""

    alpha: float = 1.0
    beta: float = 1.0
    strength: float = 1.0

    def apply(self, experience: Experience, key: Key) -> Tensor:
        rollouts, right = experience.rollouts, experience.rewards.total > 0
        bonus = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
        for number in range(group_count(rollouts.group)):
            rows = (rollouts.group == number).nonzero().flatten()
            mask = rollouts.mask[rows]
            if mask[right[rows]].any() and mask[~right[rows]].any():
                values = self._score(rollouts.tokens[rows], mask, right[rows])
                bonus[rows] = 2 * self.strength * (values.sigmoid() - 0.5)
        return bonus.float()

    def _score(self, tokens: Tensor, mask: Tensor, right: Tensor) -> Tensor:
        """K [n, T] of every token."""
        ids, place = tokens[mask].unique(return_inverse=True)
        counts = torch.zeros(len(mask), len(ids), dtype=torch.float64)  # of each id in each response
        counts.index_put_((mask.nonzero()[:, 0], place), torch.ones(()).double(), accumulate=True)
        table = count_table(counts > 0, right)
        p = fisher_p_value(*table)
        association = torch.exp(-2 * p).where(p < 1, 0.0)
        weight = (self.alpha * association + self.beta * information_gain(*table)) / (self.alpha + self.beta)
        score = torch.zeros(mask.shape, dtype=torch.float64)
        score[mask] = (weight * tendency(counts, right, mask, *table))[place]
        return score


def tendency(counts: Tensor, right: Tensor, mask: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Towards right responses above 0: Cohen's h and the difference of the term frequencies."""
    lengths = torch.stack([mask[right].sum(), mask[~right].sum()]).double()
    f = torch.stack([counts[right].sum(0), counts[~right].sum(0)]) / lengths[:, None]
    tf = f * (K1 + 1) / (f + K1 * (1 - K2 + K2 * lengths / lengths.mean())[:, None])
    h = (a / (a + c)).sqrt().asin() - (b / (b + d)).sqrt().asin()
    return h + tf[0] / (tf[1] + TF_FLOOR) - tf[1] / (tf[0] + TF_FLOOR)
