"""Reductions over tokens and over groups of rows, and the top tokens of a row.

Sums are in float64, so that a float32 result does not depend on the order or number of the rows: equal rewards have a
standard deviation of exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl.utils.seeding import rng_for


def group_count(group: Tensor) -> int:
    return int(group.max()) + 1 if group.numel() else 0


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Sum of x [N] within each group, float64 [P]."""
    return torch.zeros(group_count(group), dtype=torch.float64).index_add_(0, group, x.double())


def group_sizes(group: Tensor) -> Tensor:
    return torch.bincount(group, minlength=group_count(group))


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    """Mean of x [N] within each group, float64 [P]; NaN rows are not applicable and left out (all NaN: NaN)."""
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


def row_min_max(x: Tensor, mask: Tensor, added: float = 0.0, least: float = 0.0) -> Tensor:
    """x [N, T] scaled to 0 .. 1 by the lowest and the highest value of each row, float64; 0 off the mask. A number may
    be `added` to the range, or it is at `least` so large."""
    x = x.double()
    low = x.where(mask, torch.inf).amin(1, keepdim=True)
    spread = x.where(mask, -torch.inf).amax(1, keepdim=True) - low
    return ((x - low) / (spread + added).clamp(min=least)).where(mask, 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> float:
    """Mean of x [N, T] over all masked tokens; 0 if there are none."""
    return float(x.double()[mask].mean()) if mask.any() else 0.0


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [N, T] with mean 0 and variance (ddof 1) 1 over all masked tokens; 0 elsewhere."""
    values = x.double()[mask]
    if values.numel() < 2:
        return torch.zeros_like(x)
    whitened = (x.double() - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()
    return whitened.where(mask, 0.0).to(x.dtype)


def top_fraction(score: Tensor | None, mask: Tensor, fraction: float) -> Tensor:
    """[N, T] bool: the ceil(fraction * n) tokens with the highest score among the n valid ones of a row, at least 1.

    Ties go to the earlier token. Float64 and the 1e-6 keep rounding from adding a token: 0.3 * 50 is 15.000001 in
    float32, 0.07 * 100 is 7.000000000000001 in float64.
    """
    assert score is not None, "the probe did not measure the signal that the filter needs"
    length = mask.sum(1)
    keep = (fraction * length.double() - 1e-6).ceil().clamp(min=1).minimum(length)
    order = score.where(mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(mask.shape[1]).expand_as(order))
    return (rank < keep[:, None]) & mask


def permutation(count: int, *key: int | str) -> Tensor:
    """[count]: the numbers from 0 on, in an order drawn by the key."""
    return torch.from_numpy(rng_for(*key).permutation(count))
