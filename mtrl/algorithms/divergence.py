"""Distance of the policy to its reference, and what it costs (SPEC 4)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mtrl.algorithms.signals import low_var_kl

Penalty = Literal["kl", "abs", "mse", "low_var_kl", "full"]


def divergence(logp: Tensor, reference: Tensor, penalty: Penalty) -> Tensor:
    """Per token, of d = logp - reference. `full` needs the whole vocabulary: see `vocab.full_kl`."""
    d = logp - reference
    if penalty == "kl":
        return d
    if penalty == "abs":
        return d.abs()
    if penalty == "mse":
        return 0.5 * d**2
    if penalty == "low_var_kl":
        return low_var_kl(-d).clamp(-10.0, 10.0)
    raise ValueError(f"divergence {penalty!r} is not a function of two log-probs")


def adapt_coefficient(coef: float, kl: float, responses: int, target: float, horizon: float) -> float:
    """The `adaptive` controller after one step: `kl` is the mean over responses of the sum over tokens."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * responses / horizon)
