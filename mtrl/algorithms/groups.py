"""Reductions over tokens and over groups of rows.

Sums are taken in float64, so that neither the order of the rows nor their number shows in a float32 result: equal
rewards have a standard deviation of exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_count(group: Tensor) -> int:
    return int(group.max()) + 1 if group.numel() else 0


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Sum of x [N] within each group, float64 [P]."""
    return torch.zeros(group_count(group), dtype=torch.float64).index_add_(0, group, x.double())


def group_sizes(group: Tensor) -> Tensor:
    return torch.bincount(group, minlength=group_count(group))


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    """Mean of x [N] within each group, float64 [P]; NaN rows are "not applicable" and left out (all NaN: NaN)."""
    valid = ~x.isnan()
    return group_sum(x.where(valid, 0.0), group) / group_sum(valid, group)


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """Standard deviation (ddof 1) within each group, float64 [P]; 0 for fewer than two values."""
    valid = ~x.isnan()
    centred = (x.double() - group_mean(x, group)[group]).where(valid, 0.0)
    return (group_sum(centred**2, group) / (group_sum(valid, group) - 1).clamp(min=1)).sqrt()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [N, T] over the masked tokens of each row, float64 [N]; 0 for a row without any."""
    return x.double().where(mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def masked_mean(x: Tensor, mask: Tensor) -> float:
    """Mean of x [N, T] over all masked tokens; 0 where there are none."""
    return float(x.double()[mask].mean()) if mask.any() else 0.0


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [N, T] with mean 0 and variance (ddof 1) 1 over all masked tokens; 0 elsewhere."""
    values = x.double()[mask]
    if values.numel() < 2:
        return torch.zeros_like(x)
    whitened = (x.double() - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()
    return whitened.where(mask, 0.0).to(x.dtype)
