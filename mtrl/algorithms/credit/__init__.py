"""Credit: which tokens count, and for how much (SPEC 1.3, 1.4, 2.1, 2.2).

Computed once a step on the driver, over all rows: nothing changes with micro-batches, ranks, padding or packing.

    loss_t = term((A_t + b_t) * w * v_t) * M_t

A  the advantage           b  terms: what is added to it
w  weights of a response   v  weights of a token (trajectory advantage shaping, TAS, is the first kind)
M  filters: tokens whose gradient counts (token gradient filtering, TGF, and the entropy filter)

A rule is a small frozen dataclass in a file of its own: a `Filter`, a `Weight` or a `Bonus` (rule.py). This file is the
order of them all. `registry.py` finds rules by name, a user's by `file.py:name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Filter, Key, Rule, Weight
from mtrl.algorithms.credit.rule_checks import applied, asked, covered_rows
from mtrl.algorithms.groups import masked_mean
from mtrl.types import Credit, Experience

__all__ = ["Bonus", "Filter", "Key", "Rule", "Weight", "assign", "credit_metrics"]


def assign(rules: Sequence[Rule], experience: Experience, key: Key) -> Credit:
    """What each token deserves, by all rules in their order; without any, the plain advantage. `key`: (seed, step)."""
    advantage, mask = experience.advantage, experience.rollouts.mask
    assert advantage is not None, "credit is given after the advantages"
    for rule in rules:
        if isinstance(rule, Bonus):
            advantage = advantage + applied(rule, experience, key)
    scale, measure = torch.ones(len(mask)), mask.float()
    of_tokens: Tensor | None = None  # product of all weights per token
    for rule in rules:
        if not isinstance(rule, Weight) or (weight := applied(rule, experience, key)) is None:
            continue
        if weight.ndim == 2:
            of_tokens = weight if of_tokens is None else of_tokens * weight
        else:
            scale = scale * weight
            weight = weight[:, None]
        if rule.target == "advantage":
            advantage = advantage * weight
        else:
            measure = measure * weight.where(mask, 0.0)
    return Credit(advantage.where(mask, 0.0), select(rules, experience, key), measure, scale, of_tokens)


def select(rules: Sequence[Rule], experience: Experience, key: Key) -> Tensor:
    """M [N, T]: the union of the filters. A row that no filter speaks for keeps all its tokens."""
    mask = experience.rollouts.mask
    chosen, judged = torch.zeros_like(mask), torch.zeros(len(mask), dtype=torch.bool)
    for rule in rules:
        if isinstance(rule, Filter):
            speaks = covered_rows(rule, experience)
            chosen |= applied(rule, experience, key) & mask & speaks[:, None]
            judged |= speaks
    return chosen.where(judged[:, None], mask)


def credit_metrics(rules: Sequence[Rule], experience: Experience) -> dict[str, float]:
    """What each rule reports of a step that has its credit, and which share of the tokens the filters left."""
    assert experience.credit is not None
    values: dict[str, float] = {}
    for rule in rules:
        values |= asked(rule, partial(rule.metrics, experience))
    if any(isinstance(rule, Filter) for rule in rules):
        values["actor/combined_token_fraction"] = masked_mean(experience.credit.keep_mask, experience.rollouts.mask)
    return values
