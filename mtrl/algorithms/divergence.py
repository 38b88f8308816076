"""Distance of the policy to its reference, and what it costs (SPEC 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mtrl.algorithms.signals import low_var_kl
from mtrl.types import Needs, Signals

Penalty = Literal["kl", "abs", "mse", "low_var_kl", "full"]


def divergence(logp: Tensor, reference: Tensor, penalty: Penalty) -> Tensor:
    """The penalty of each token, a function of d = logp - reference. `full` is another matter: see `vocab.full_kl`."""
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
    """What distance from the reference costs, and where: in the reward or as a loss."""

    penalty: Penalty
    coef: float
    in_loss: bool = False
    adaptive: bool = False
    target: float = 6.0
    horizon: float = 10_000.0

    @property
    def needs(self) -> Needs:
        if self.penalty == "full" and self.in_loss and not self.adaptive:
            return Needs()  # the update asks the reference itself, and nobody reads it before
        return Needs("old_logprobs", "divergence" if self.penalty == "full" else "ref_logprobs")

    def distance(self, signals: Signals) -> Tensor:
        """[N, T]: how far the policy, before this step's updates, is from the reference."""
        if signals.divergence is not None:
            return signals.divergence
        assert signals.old_logprobs is not None and signals.ref_logprobs is not None
        return divergence(signals.old_logprobs, signals.ref_logprobs, self.penalty)

    def reward_penalty(self, signals: Signals) -> Tensor | None:
        """[N, T]: what the distance takes off the reward of each token; None where it is a loss."""
        return None if self.in_loss else self.coef * self.distance(signals)

    def mean(self, signals: Signals, mask: Tensor) -> float:
        """Mean over responses of the KL of a response, which is the sum over its tokens."""
        return float(self.distance(signals).where(mask, 0.0).sum(1).double().mean())

    def after_step(self, signals: Signals, mask: Tensor) -> tuple[Divergence, dict[str, float]]:
        """This divergence for the next step, and what is to be said of it. A distance that the update alone has
        measured is reported by the update."""
        if not self.needs:
            return self, {"actor/kl_coef": self.coef}
        kl = self.mean(signals, mask)
        return self.adapted(kl, len(mask)), {"actor/kl_coef": self.coef, "actor/reference_kl": kl}

    def adapted(self, kl: float, responses: int) -> Divergence:
        """This divergence for the next step: an adaptive coefficient has moved towards the target."""
        if not self.adaptive:
            return self
        return replace(self, coef=adapt_coefficient(self.coef, kl, responses, self.target, self.horizon))


def adapt_coefficient(coef: float, kl: float, responses: int, target: float, horizon: float) -> float:
    """The `adaptive` controller after one step: `kl` is the mean over responses of the sum over tokens."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * responses / horizon)
