"""The critic's loss and metrics (SPEC 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.groups import masked_mean
from mtrl.algorithms.losses import weighted_sum
from mtrl.types import Experience, TrainBatch


@dataclass(frozen=True)
class ValueLoss:
    """Settings of the critic's loss."""

    clip: float = 0.5  # clip range around the old value; inf: no clipping


def value_loss(values: Tensor, batch: TrainBatch, loss: ValueLoss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of these rows with gradients, and metrics; both add up over the slices of an optimizer step.

    Per token it is half the squared error of the value or of the clipped value, whichever is larger. `values` [N, T]
    may hold anything off the mask.
    """
    assert batch.returns is not None and batch.values is not None, "a critic learns from returns and its old values"
    weights, returns, old = batch.weights.token, batch.returns, batch.values
    values = values.where(batch.rollouts.mask, 0.0)  # no gradient off the mask, whatever is there
    free = (values - returns) ** 2
    bound = (values.clamp(old - loss.clip, old + loss.clip) - returns) ** 2
    total = 0.5 * weighted_sum(weights, torch.maximum(free, bound))
    metrics = {
        "value_loss": total,
        "value_clipfrac": weighted_sum(weights, bound > free),
        "value_mean": weighted_sum(weights, values),
    }
    return total, {name: value.detach() for name, value in metrics.items()}


def value_metrics(experience: Experience) -> dict[str, float]:
    """How well the critic predicted the returns before the update; empty without a critic."""
    values, returns, mask = experience.signals.values, experience.returns, experience.rollouts.mask
    if values is None or returns is None:
        return {}
    metrics = {"critic/return_mean": masked_mean(returns, mask)}
    explained = explained_variance(values, returns, mask)
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns) over all valid tokens: 1 is a perfect critic, 0 a constant
    one. None if the returns do not differ."""
    known, expected = returns.double()[mask], values.double()[mask]
    if len(known) < 2 or known.var() == 0:
        return None
    return float(1 - (known - expected).var() / known.var())
