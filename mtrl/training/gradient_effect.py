"""Measures what the credit rules of a run change in the gradient of its first step, before anything is trained.

A rule that does not change the direction of the gradient teaches the same as plain credit, however different its
weights look: most of a gradient may come from a few tokens that every rule keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mtrl.algorithms.batches import assemble
from mtrl.algorithms.credit import assign
from mtrl.training.loop import Loop
from mtrl.types import Experience


@dataclass(frozen=True)
class GradientEffect:
    """`cosine`: between the gradient with the rules and the plain one. `size`: ratio of their norms.
    `kept_surprise`: share of the sum of c = |A| (1 - p) over tokens; c bounds what a token adds to the gradient.
    `effective_tokens`: effective number of tokens per response, (sum of c)² / sum of c², mean over responses;
    `plain_tokens`: the same without rules."""

    cosine: float
    size: float
    kept_surprise: float
    effective_tokens: float
    plain_tokens: float


def measure_gradient_effect(loop: Loop) -> GradientEffect:
    """Sample the first step and compute both gradients. No weight changes; the task source advances."""
    experience = loop.assign_credit(loop.collect(0).experience, 0)
    plain = replace(experience, credit=assign((), experience, (loop.spec.seed, 0)))
    ours, theirs = policy_gradient(loop, experience), policy_gradient(loop, plain)
    norms = dot(ours, ours) ** 0.5, dot(theirs, theirs) ** 0.5
    share, base = surprise(experience), surprise(plain)
    return GradientEffect(
        cosine=dot(ours, theirs) / max(norms[0] * norms[1], 1e-30),
        size=norms[0] / max(norms[1], 1e-30),
        kept_surprise=float(share.sum() / base.sum().clamp(min=1e-30)),
        effective_tokens=effective(share),
        plain_tokens=effective(base),
    )


def policy_gradient(loop: Loop, experience: Experience) -> list[Tensor]:
    spec, actor = loop.spec, loop.components.actor
    loss = spec.loss.with_divergence(loop.divergence)
    batches = list(assemble(spec.batches, loss, experience, (spec.seed, 0)))
    worker: Any = actor  # LocalActor; ranks have no such method
    return worker.gradient(batches, loss)


def dot(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(ours, theirs, strict=True))


def surprise(experience: Experience) -> Tensor:
    """c [N, T] = |A'| (1 - p) of the tokens that count, float64: it bounds what a token adds to the gradient."""
    credit, rollouts = experience.credit, experience.rollouts
    assert credit is not None
    p = rollouts.rollout_logprobs.double().exp().clamp(max=1.0)
    return (credit.advantage.double().abs() * credit.token_weight.double() * (1 - p)).where(
        credit.keep_mask & rollouts.mask, 0.0
    )


def effective(share: Tensor) -> float:
    """Mean over the responses with any such token."""
    total, squares = share.sum(1), (share**2).sum(1)
    counted = squares > 0
    return float((total[counted] ** 2 / squares[counted]).mean()) if counted.any() else 0.0
