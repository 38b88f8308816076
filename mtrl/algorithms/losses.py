"""Policy losses, their aggregation as data, and the correction of the sampler's mismatch (SPEC 4).

Aggregation is data: mask, loss type and global denominator are folded into `LossWeights` once, over all rows of an
optimizer step. A term's loss is then sum(weight * term), and micro-batches and ranks only add.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.divergence import Divergence, Penalty, divergence
from mtrl.algorithms.groups import row_mean
from mtrl.algorithms.signals import LOG_RATIO_LIMIT
from mtrl.types import LossWeights, Needs, TrainBatch
from mtrl.utils.plugin_registry import Registry
from mtrl.utils.user_code import call_user_code, check_shape

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicyLoss(ABC):
    """The policy-gradient term; its fields are configuration keys of the same names."""

    importance_sampling_level: Level = "token"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.3

    @property
    def level(self) -> Level:
        return self.importance_sampling_level

    @abstractmethod
    def term(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] loss of each token, with gradients, from the importance ratio, the log-probs and the advantages."""

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T] bool each: the tokens that this loss clips at the lower and at the upper end, for metrics only. A loss
        that clips says so here; this one clips none."""
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return none, none


@dataclass(frozen=True)
class Ppo(PolicyLoss):
    clip_ratio_dual: float | None = 3.0

    def term(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        if self.clip_ratio_dual is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.clip_ratio_dual * advantage), gain)
        return -gain

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that the clip took the gradient of. The dual clip is not counted, as in TRL."""
        low = (ratio < 1 - self.clip_ratio_low) & (advantage < 0)
        return low, (ratio > 1 + self.clip_ratio_high) & (advantage > 0)


@dataclass(frozen=True)
class Gspo(Ppo):
    """PPO with one ratio per response."""

    @property
    def level(self) -> Level:
        return "sequence"


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    cispo_clip_high: float = 5.0

    def term(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        return -ratio.detach().clamp(max=self.cispo_clip_high) * advantage * logp

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens whose ratio is capped, for either sign of A. They keep a gradient; there is no lower end."""
        high = (ratio > self.cispo_clip_high) & (advantage != 0)
        return torch.zeros_like(high), high


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """A soft gate: no token is clipped, and the clip fractions are 0."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def term(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        tau = torch.where(advantage > 0, self.tau_positive, self.tau_negative)
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage


POLICY_LOSSES = Registry[PolicyLoss](
    "policy loss", (PolicyLoss,), {"ppo": Ppo, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo}
)


class LossTerm(ABC):
    """Added to the loss of every valid token, and averaged as `optimization.loss_type` says. Subclasses are frozen
    dataclasses whose fields are the arguments in the configuration; `mtrl/algorithms/loss_terms` has them by name."""

    @property
    def needs(self) -> Needs:
        """The signals that the term reads, one number per token each; subclasses set a class attribute."""
        return Needs()

    @property
    def live_needs(self) -> Needs:
        """Quantities of other views, such as `logprobs@none`, which each pass of the update computes anew, with
        gradients through both views; subclasses set a class attribute."""
        return Needs()

    @abstractmethod
    def term(self, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        """[N, T], with gradients through the current policy's log-probs `logp` [N, T]. `signals` are those of `needs`,
        measured before the updates of the step, those of `live_needs`, with gradients, and `visual` [N, 1] bool, the
        responses that saw an image. Off the mask anything may be there."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Loss:
    """Everything the actor knows of the algorithm; a coefficient of 0 removes its term."""

    policy: PolicyLoss = Ppo()
    divergence: Penalty = "low_var_kl"
    divergence_coef: float = 0.0
    entropy_penalty_coef: float = 0.0
    tis_clip: float | None = None
    tis_level: Level = "token"
    terms: tuple[LossTerm, ...] = ()

    @property
    def live_needs(self) -> Needs:
        return reduce(Needs.__or__, (term.live_needs for term in self.terms), Needs())

    @property
    def full_divergence(self) -> bool:
        """Whether a term needs the full vocabulary of policy and reference."""
        return self.divergence == "full" and self.divergence_coef != 0

    def with_divergence(self, rule: Divergence | None) -> Loss:
        """This loss with the divergence as a term, unless it is part of the reward."""
        if rule is None or not rule.use_divergence_loss:
            return self
        return replace(self, divergence=rule.divergence_penalty, divergence_coef=rule.divergence_coef)


def total_loss(
    logp: Tensor,
    batch: TrainBatch,
    loss: Loss,
    full_kl: Tensor | None = None,
    live: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of these rows with gradients, and metrics; both add up over the slices of an optimizer step.

    `logp` [N, T] are the current policy's log-probs; off the mask they may hold anything. `full_kl` [N, T] is the
    divergence from the reference over the vocabulary, with gradients, if it is a term of the loss. `live` are the
    `live_needs` of the loss.
    """
    mask, weights, sampled = batch.rollouts.mask, batch.weights, batch.rollouts.rollout_logprobs
    logp = logp.where(mask, 0.0)  # no gradient off the mask, whatever is there
    old, correction = batch.old_logprobs, batch.correction
    if fresh := old is None:  # rho is 1, but its gradient is not 0
        old, correction = logp.detach(), None
    if correction is None:
        correction = mismatch_correction(old, sampled, batch.rollouts.comparable, loss.tis_clip, loss.tis_level)
    ratio = importance_ratio(logp, old, mask, loss.policy.level)
    what = f"policy loss {type(loss.policy).__name__}"
    term = call_user_code(what, lambda: loss.policy.term(ratio, logp, batch.advantage))
    check_shape(what, term, logp.shape, "the loss of each token, [N, T]")
    policy = weighted_sum(weights.policy * correction, term)
    total = policy
    low, high = call_user_code(what, lambda: loss.policy.clipped(ratio, batch.advantage))
    clipped_low, clipped_high = weighted_sum(weights.token, low), weighted_sum(weights.token, high)
    metrics = {
        "pg_loss": policy,
        "approx_kl": weighted_sum(weights.token, old - logp),
        "clipfrac": clipped_low + clipped_high,
        "clipfrac_low": clipped_low,
        "clipfrac_high": clipped_high,
    }
    if fresh:  # otherwise the probe reports the gap
        metrics["logprob_gap_mean"] = weighted_sum(weights.gap, (old - sampled).abs())
        metrics["logprob_gap_kl"] = weighted_sum(weights.gap, sampled - old)
    if loss.divergence_coef:
        distance = weighted_sum(weights.divergence, _distance(logp, batch, loss, full_kl))
        total = total + loss.divergence_coef * distance
        metrics["divergence_loss"] = distance
    if loss.entropy_penalty_coef:
        surprise = weighted_sum(weights.token, -logp)
        total = total + loss.entropy_penalty_coef * surprise
        metrics["entropy_penalty"] = surprise
    for each in loss.terms:
        value = weighted_sum(weights.token, _compute_term(each, logp, {**batch.signals, **live}))
        total = total + value
        metrics[f"{each.name}_loss"] = value
    return total, {name: value.detach() for name, value in metrics.items()}


def _compute_term(term: LossTerm, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
    """[N, T], checked."""
    what = f"loss term {type(term).__name__}"
    values = call_user_code(what, lambda: term.term(logp, signals))
    check_shape(what, values, logp.shape, "the loss of each token, [N, T]")
    return values


def _distance(logp: Tensor, batch: TrainBatch, loss: Loss, full_kl: Tensor | None) -> Tensor:
    """[N, T]: divergence from the reference at each token, with gradients."""
    if loss.full_divergence:
        assert full_kl is not None, "the full divergence is computed over the vocabulary"
        return full_kl
    assert batch.ref_logprobs is not None, "a divergence loss needs the reference's log-probs"
    return divergence(logp, batch.ref_logprobs, loss.divergence)


def importance_ratio(logp: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """rho [N, T]. At the sequence level its value is s_i and its gradient that of the token, so that token masks and
    weights keep their meaning. The logarithm is clamped to +-20: a gradient of 0 does less harm than an overflow."""
    log_ratio = (logp - old).where(mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "token":
        return log_ratio.exp()
    sequence = row_mean(log_ratio.detach(), mask).exp().to(logp.dtype)[:, None]
    return sequence * (logp - logp.detach()).where(mask, 0.0).exp()


def weighted_sum(weight: Tensor, term: Tensor) -> Tensor:
    """sum(weight * term); a weight of 0 ignores the term, even if it is not finite."""
    return (weight * torch.where(weight != 0, term, 0.0)).sum()


def loss_weights(
    token_weight: Tensor,
    keep_mask: Tensor,
    loss_type: LossType,
    max_response_length: int,
    denominator: Literal["all", "selected"] = "all",
    silenced: Tensor | None = None,
    noised: Tensor | None = None,
) -> LossWeights:
    """Weights over all rows of one optimizer step.

    `token_weight` [N, T] is what a token counts for (the mask, or the mask times weights), `keep_mask` [N, T] selects
    the tokens with a policy gradient, `silenced` [N] responses without any (truncated ones): like TRL's masked
    completions they leave the policy term's token count, yet still count as responses. `noised` [N] responses are left
    out of the weights of the sampler's gap.
    """
    token_weight = token_weight.double()
    voiced = token_weight if silenced is None else token_weight.where(~silenced[:, None], 0.0)
    counted = voiced if denominator == "all" else voiced * keep_mask
    policy = voiced * keep_mask / aggregation_denominator(counted, loss_type, max_response_length)
    return LossWeights(
        policy=policy.float(),
        divergence=(token_weight / aggregation_denominator(token_weight, loss_type, max_response_length)).float(),
        token=token_mean(token_weight),
        comparable=None if noised is None else token_mean(token_weight.where(~noised[:, None], 0.0)),
    )


def token_mean(token_weight: Tensor) -> Tensor:
    return (token_weight / aggregation_denominator(token_weight, "dapo", 1)).float()


def aggregation_denominator(counted: Tensor, loss_type: LossType, max_response_length: int) -> Tensor:
    """[N, 1]: the denominator of each row's token sum; never 0."""
    rows = len(counted)
    if loss_type == "grpo":  # mean over responses of their token mean
        per_row = rows * counted.sum(1, keepdim=True)
    elif loss_type == "dr_grpo":
        per_row = torch.full((rows, 1), float(rows * max_response_length), dtype=counted.dtype)
    else:  # dapo; bnpo is the same with global denominators
        per_row = counted.sum().expand(rows, 1)
    return per_row.where(per_row > 0, 1.0)


def mismatch_correction(old: Tensor, sampled: Tensor, mask: Tensor, clip: float | None, level: Level) -> Tensor:
    """min(exp(o - b), clip) [N, T], truncated importance sampling; 1 without a clip and off the mask, which is
    `Rollouts.comparable`.

    At the sequence level it is the ratio of the whole response's probabilities, as in TRL and verl.
    """
    if clip is None:
        return torch.ones_like(old)
    gap = (old - sampled).where(mask, 0.0)
    if level == "sequence":
        gap = gap.double().sum(1, keepdim=True).to(gap.dtype).expand_as(gap)  # float64: independent of padding
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=clip).where(mask, 1.0)
