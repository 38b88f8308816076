"""What a critic descends, and what is reported of its values (SPEC 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.groups import masked_mean
from mtrl.algorithms.losses import weighted_sum
from mtrl.types import Experience, TrainBatch


@dataclass(frozen=True)
class ValueLoss:
    """All that a critic is told of the algorithm."""

    clip: float = 0.5  # how far a value may move from the old one and still learn; inf: as far as it likes


def value_loss(values: Tensor, batch: TrainBatch, loss: ValueLoss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of these rows with gradients, and metrics; both add up over the slices of an optimizer step.

    Of a token it is half the squared distance to its return: that of the value, or that of the value clipped to the
    neighbourhood of the old one, whichever is larger. `values` [N, T] may hold anything off the mask.
    """
    assert batch.returns is not None and batch.values is not None, "a critic learns from returns and its old values"
    weights, returns, old = batch.weights.token, batch.returns, batch.values
    values = values.where(batch.rollouts.mask, 0.0)  # what stands off the mask gets a gradient of 0, whatever it is
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
    """How much of the returns the critic knew before it learnt from them; nothing where there is no critic."""
    values, returns, mask = experience.signals.values, experience.returns, experience.rollouts.mask
    if values is None or returns is None:
        return {}
    found = {"critic/return_mean": masked_mean(returns, mask)}
    explained = explained_variance(values, returns, mask)
    return found if explained is None else found | {"critic/explained_variance": explained}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns) over all valid tokens: 1 is a critic that knows, 0 one that says the
    same of everything. None where the returns do not differ."""
    known, expected = returns.double()[mask], values.double()[mask]
    if len(known) < 2 or known.var() == 0:
        return None
    return float(1 - (known - expected).var() / known.var())
