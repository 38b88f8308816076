"""Credit: which tokens count, and for how much (SPEC 1.3, 1.4, 2.1, 2.2).

Computed once per step on the driver, over all rows, so that it does not depend on micro-batches, ranks or padding.

    loss_t = term((A_t + b_t) * w * v_t) * M_t

A  the advantage             b  bonuses, added to it
w  weights of a response     v  weights of a token (trajectory advantage shaping, TAS, is a weight of the first kind)
M  filters: the tokens whose gradient counts (token gradient filtering, TGF, and the entropy filter)

A rule is a small frozen dataclass in its own file: a `Filter`, a `Weight` or a `Bonus` (rule.py). This file applies
them in order. `registry.py` finds rules by name, or a user's rule by `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Filter, Key, Rule, Weight, apply_rule, call_rule, covered_rows
from mtrl.algorithms.groups import masked_mean
from mtrl.types import Credit, Experience

__all__ = ["Bonus", "Filter", "Key", "Rule", "Weight", "assign", "credit_metrics"]


def assign(rules: Sequence[Rule], experience: Experience, key: Key) -> Credit:
    """Apply all rules in order; without any, the credit is the plain advantage. `key`: (seed, step)."""
    advantage, mask = experience.advantage, experience.rollouts.mask
    assert advantage is not None, "credit is assigned after the advantages are computed"
    for rule in rules:
        if isinstance(rule, Bonus):
            advantage = advantage + apply_rule(rule, experience, key)
    response_weight, token_weight = torch.ones(len(mask)), mask.float()
    weights: Tensor | None = None  # product of all per-token weights
    for rule in rules:
        if not isinstance(rule, Weight) or (weight := apply_rule(rule, experience, key)) is None:
            continue
        if weight.ndim == 2:
            weights = weight if weights is None else weights * weight
        else:
            response_weight = response_weight * weight
            weight = weight[:, None]
        if rule.target == "advantage":
            advantage = advantage * weight
        else:
            token_weight = token_weight * weight.where(mask, 0.0)
    keep_mask = combine_filters(rules, experience, key)
    return Credit(advantage.where(mask, 0.0), keep_mask, token_weight, response_weight, weights)


def combine_filters(rules: Sequence[Rule], experience: Experience, key: Key) -> Tensor:
    """M [N, T]: the union of the filters. A row that no filter applies to keeps all its tokens."""
    mask = experience.rollouts.mask
    chosen, judged = torch.zeros_like(mask), torch.zeros(len(mask), dtype=torch.bool)
    for rule in rules:
        if isinstance(rule, Filter):
            rows = covered_rows(rule, experience)
            chosen |= apply_rule(rule, experience, key) & mask & rows[:, None]
            judged |= rows
    return chosen.where(judged[:, None], mask)


def credit_metrics(rules: Sequence[Rule], experience: Experience) -> dict[str, float]:
    """Metrics of each rule, and the share of the tokens that the filters keep."""
    assert experience.credit is not None
    values: dict[str, float] = {}
    for rule in rules:
        values |= call_rule(rule, partial(rule.metrics, experience))
    if any(isinstance(rule, Filter) for rule in rules):
        values["actor/combined_token_fraction"] = masked_mean(experience.credit.keep_mask, experience.rollouts.mask)
    return values
