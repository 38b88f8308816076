"""Reward arithmetic: parts to a total, weight schedules, attention rewards (SPEC 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.advantages import STD_EPSILON
from mtrl.algorithms.groups import group_count, group_mean, group_std

Normalizer = Literal["iqr", "mad"]
FLAT_SPREAD = 1e-6  # a group that differs by less gets the neutral value
# Spread relative to the median that rounding alone can cause between identical responses, by the dtype of the attention
# (measured: docs/attention.md).
VGR_ROUNDING = {"fp32": 1e-5, "bf16": 5e-3}


def combine(
    parts: Mapping[str, Tensor],
    weights: Sequence[float],
    group: Tensor,
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> Tensor:
    """Total [N]: the weighted sum of the parts; NaN (not applicable) is left out.

    `normalize_then_sum` standardises each part in its group first, so that parts with a small range count too.
    """
    total = torch.zeros(len(group), dtype=torch.float64)
    for part, weight in zip(parts.values(), weights, strict=True):
        if normalize == "normalize_then_sum":
            part = (part - group_mean(part, group)[group]) / (group_std(part, group)[group] + STD_EPSILON)
        total += weight * part.double().nan_to_num(nan=0.0)
    return total.float()


def scheduled_weights(progress: float, schedule: Sequence[tuple[float, Sequence[float]]]) -> Sequence[float]:
    """The weights of the last entry that has started. `progress` is step / total steps, from 0.

    >>> scheduled_weights(0.1, [(0.0, [1, 2]), (0.1, [3, 0])])
    [3, 0]
    """
    return [weights for start, weights in schedule if start <= progress][-1]


def soft_overlong(length: Tensor, limit: int, cache: int) -> Tensor:
    """0 up to limit - cache tokens, then linear to -1 at the limit; -1 beyond. A cache of 0 is a hard limit."""
    over = length - (limit - cache)
    return -(over / max(cache, 1)).clamp(0.0, 1.0)


def mdi_reward(mdi: Tensor, balance_ratio: float) -> Tensor:
    """1 at perfect balance (MDI 1), -1 if one side gets `balance_ratio` times its share or more. NaN stays NaN."""
    balance = (1 - mdi.log().abs() / math.log(balance_ratio)).clamp(0.0, 1.0)
    return 2 * balance - 1


def vgr_reward(
    vgr: Tensor, group: Tensor, normalizer: Normalizer = "iqr", rounding: float = VGR_ROUNDING["fp32"]
) -> Tensor:
    """Lower VGR than the rest of the group is better. NaN (no vision) stays NaN."""
    neutral = neutral_value(normalizer)
    reward = torch.full_like(vgr, torch.nan)
    for g in range(group_count(group)):
        members = ((group == g) & ~vgr.isnan()).nonzero().flatten()
        reward[members] = rank_in_pool(vgr[members], vgr[members], normalizer, neutral, rounding)
    return reward


def vgr_hard_negative_reward(
    vgr: Tensor,
    accuracy: Tensor,
    group: Tensor,
    normalizer: Normalizer = "iqr",
    pool: Literal["correct", "group"] = "correct",
    rounding: float = VGR_ROUNDING["fp32"],
) -> Tensor:
    """VGR reward of the correct responses, 0 for wrong ones. Statistics of the correct ones or of the whole group."""
    neutral = neutral_value(normalizer)
    correct = accuracy == 1
    reward = torch.where(vgr.isnan(), torch.nan, 0.0)
    for g in range(group_count(group)):
        seen = (group == g) & ~vgr.isnan()
        judged = (seen & correct).nonzero().flatten()
        compared = vgr[seen & correct] if pool == "correct" else vgr[seen]
        reward[judged] = rank_in_pool(vgr[judged], compared, normalizer, neutral, rounding) - neutral
    return reward


def rank_in_pool(value: Tensor, pool: Tensor, normalizer: Normalizer, neutral: float, rounding: float) -> Tensor:
    """Each value against the pool's statistics; neutral if the pool has fewer than 2 values or a spread that rounding
    can cause (`rounding` times its median)."""
    if len(pool) < 2:
        return torch.full_like(value, neutral)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.quantile(pool.double(), quartiles).tolist()
    flat = max(FLAT_SPREAD, rounding * median)
    if normalizer == "iqr":
        if high - low <= flat:
            return torch.full_like(value, neutral)
        return ((high - value) / (high - low)).clamp(0.0, 1.0)
    deviation = torch.quantile((pool.double() - median).abs(), 0.5).item()
    if deviation <= flat:
        return torch.full_like(value, neutral)
    return 0.5 * torch.tanh((median - value) / (1.4826 * deviation + 1e-6))


def neutral_value(normalizer: Normalizer) -> float:
    return 0.5 if normalizer == "iqr" else 0.0
