"""The tokens of a response with the highest scores."""

from __future__ import annotations

import torch
from torch import Tensor


def top_fraction(score: Tensor | None, mask: Tensor, fraction: float) -> Tensor:
    """[N, T] bool: the ceil(fraction * n) tokens with the highest score among the n valid ones of a row, at least 1.

    Ties go to the earlier token. Float64 and the 1e-6 keep rounding from adding a token: 0.3 * 50 is 15.000001 in
    float32, 0.07 * 100 is 7.000000000000001 in float64.
    """
    assert score is not None, "the filter needs its signal: the probe was not asked for it"
    length = mask.sum(1)
    keep = (fraction * length.double() - 1e-6).ceil().clamp(min=1).minimum(length)
    order = score.where(mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(mask.shape[1]).expand_as(order))
    return (rank < keep[:, None]) & mask
