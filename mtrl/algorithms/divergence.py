"""Divergence of the policy from its reference, as a reward penalty or a loss (SPEC 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mtrl.algorithms.signals import low_var_kl
from mtrl.types import Needs, Signals

Penalty = Literal["kl", "abs", "mse", "low_var_kl", "full"]


def divergence(logp: Tensor, reference: Tensor, penalty: Penalty) -> Tensor:
    """The penalty of each token, a function of d = logp - reference. For `full` see `vocab.full_kl`."""
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


@dataclass(frozen=True)
class Divergence:
    """The divergence term: which estimator, its coefficient, and whether it is in the reward or in the loss."""

    divergence_penalty: Penalty
    divergence_coef: float
    use_divergence_loss: bool = False
    divergence_type: Literal["fixed", "adaptive"] = "fixed"
    divergence_target: float = 6.0
    divergence_horizon: float = 10_000.0

    @property
    def adaptive(self) -> bool:
        return self.divergence_type == "adaptive"

    @property
    def in_update(self) -> bool:
        """Whether an update computes it over the whole vocabulary, and queries the reference itself."""
        return self.divergence_penalty == "full" and self.use_divergence_loss

    @property
    def needs(self) -> Needs:
        if self.in_update and not self.adaptive:
            return Needs()
        return Needs("old_logprobs", "divergence" if self.divergence_penalty == "full" else "ref_logprobs")

    def distance(self, signals: Signals) -> Tensor:
        """[N, T]: divergence of the old policy from the reference."""
        if signals.divergence is not None:
            return signals.divergence
        assert signals.old_logprobs is not None and signals.ref_logprobs is not None
        return divergence(signals.old_logprobs, signals.ref_logprobs, self.divergence_penalty)

    def reward_penalty(self, signals: Signals) -> Tensor | None:
        """[N, T]: penalty subtracted from each token's reward; None if the divergence is a loss."""
        return None if self.use_divergence_loss else self.divergence_coef * self.distance(signals)

    def mean(self, signals: Signals, mask: Tensor) -> float:
        """Mean over responses of the KL summed over tokens."""
        return float(self.distance(signals).where(mask, 0.0).sum(1).double().mean())

    def after_step(self, signals: Signals, mask: Tensor) -> tuple[Divergence, dict[str, float]]:
        """The divergence of the next step, and metrics. If only the update measures the distance, it reports it."""
        if not self.needs:
            return self, {"actor/kl_coef": self.divergence_coef}
        kl = self.mean(signals, mask)
        return self.adapted(kl, len(mask)), {"actor/kl_coef": self.divergence_coef, "actor/reference_kl": kl}

    def adapted(self, kl: float, responses: int) -> Divergence:
        """With the coefficient adapted towards the target, if it is adaptive."""
        if not self.adaptive:
            return self
        coef, target, horizon = self.divergence_coef, self.divergence_target, self.divergence_horizon
        return replace(self, divergence_coef=adapt_coefficient(coef, kl, responses, target, horizon))


def adapt_coefficient(coef: float, kl: float, responses: int, target: float, horizon: float) -> float:
    """The `adaptive` controller after one step: `kl` is the mean over responses of the sum over tokens."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * responses / horizon)
