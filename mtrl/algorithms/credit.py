"""Credit: which tokens count, and for how much (SPEC 1.3, 1.4, 2.1, 2.2).

Everything here is computed once a step on the driver, over all rows, before the batch is split. So nothing changes with
the micro-batch size, the number of ranks, padding or packing.

    loss_t = term(A_t * w * v_t) * M_t

A  the advantage           w  how much the whole response looked (trajectory advantage shaping, TAS)
v  the token's weight      M  tokens whose gradient counts (token gradient filtering, TGF, and the entropy filter)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.groups import row_mean
from mtrl.algorithms.signals import pool_sizes, segment, vgr
from mtrl.types import Credit, Rollouts, Signals

FLAT_RANGE = 1e-6  # scores closer than this cannot be told apart: every response keeps scale 1


@dataclass(frozen=True)
class Scaling:
    """`trajectory_scaling_min` and `_max`; no maximum is no cap."""

    low: float = 0.8
    high: float | None = 2.0


@dataclass(frozen=True)
class TokenWeighting:
    """How attention becomes token weights (SPEC 2.1)."""

    target: Literal["advantage", "mask"] = "advantage"
    clip: tuple[float, float] = (0.2, 3.0)
    smooth_sigma: float = 0.0
    top_ratio: float | None = None


@dataclass(frozen=True)
class CreditRule:
    """Which of the ideas are on. The default gives every token the plain advantage."""

    perception_top_p: float | None = None
    entropy_top_p: float | None = None
    scaling: Scaling | None = None
    weighting: TokenWeighting | None = None


def assign(
    rule: CreditRule,
    advantage: Tensor,
    mask: Tensor,
    visual: Tensor,
    signals: Signals,
    token_weights: Tensor | None = None,
) -> Credit:
    """From advantage [N, T] to Credit. `visual` [N] marks rows with an image: the others carry no perception signal.

    `token_weights` [N, T] are v, from `attention_weights` or from a reward function.
    """
    scale = torch.ones(len(mask))
    if rule.scaling:
        scale = trajectory_scale(signals.dependency, mask, visual, rule.scaling)
    shaped = advantage * scale[:, None]
    measure = mask.float()
    if rule.weighting and token_weights is not None:
        if rule.weighting.target == "advantage":
            shaped = shaped * token_weights
        else:
            measure = token_weights.where(mask, 0.0)
    select, weights = select_tokens(rule, mask, visual, signals), token_weights if rule.weighting else None
    return Credit(shaped.where(mask, 0.0), select, measure, scale, weights)


def token_weights(rule: CreditRule, supplied: Tensor | None, rollouts: Rollouts, signals: Signals) -> Tensor | None:
    """v [N, T]: those that a reward function supplied, else by attention; None where no weighting is on."""
    if rule.weighting is None or supplied is not None or signals.mass is None:
        return supplied if rule.weighting else None
    sizes = pool_sizes(rollouts.prompts)[rollouts.group]
    return attention_weights(segment(signals.mass, "weight"), sizes, rollouts.mask, rule.weighting)


def select_tokens(rule: CreditRule, mask: Tensor, visual: Tensor, signals: Signals) -> Tensor:
    """M [N, T]: the union of the filters that are on. A row that no filter speaks for keeps all its tokens."""
    select = torch.zeros_like(mask)
    judged = torch.zeros_like(visual)
    if rule.perception_top_p is not None:
        select |= top_fraction(signals.dependency, mask, rule.perception_top_p) & visual[:, None]
        judged |= visual
    if rule.entropy_top_p is not None:
        select |= top_fraction(signals.entropy, mask, rule.entropy_top_p)
        judged |= True
    return select.where(judged[:, None], mask)


def top_fraction(score: Tensor | None, mask: Tensor, fraction: float) -> Tensor:
    """[N, T] bool: of each row's n valid tokens exactly ceil(fraction * n) of highest score, at least 1.

    Ties go to the earlier token. Float64 and the 1e-6 keep rounding from adding a token: 0.3 * 50 is 15.000001 in
    float32, 0.07 * 100 is 7.000000000000001 in float64.
    """
    assert score is not None, "the filter needs its signal: the probe was not asked for it"
    length = mask.sum(1)
    keep = (fraction * length.double() - 1e-6).ceil().clamp(min=1).minimum(length)
    order = score.where(mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(mask.shape[1]).expand_as(order))
    return (rank < keep[:, None]) & mask


def trajectory_scale(dependency: Tensor | None, mask: Tensor, visual: Tensor, scaling: Scaling) -> Tensor:
    """w [N]: responses that look more get more, with mean 1 unless the cap binds. Rows without an image keep 1."""
    assert dependency is not None, "trajectory shaping needs S: the probe was not asked for it"
    scored = visual & mask.any(1)
    scale = torch.ones(len(mask), dtype=torch.float64)
    if scored.any():
        score = row_mean(dependency, mask)[scored]
        spread = score.max() - score.min()
        if spread > FLAT_RANGE:
            u = (score - score.min()) / spread
            scale[scored] = scaling.low + u * (scaling_top(u, scaling) - scaling.low)
    return scale.float()


def scaling_top(u: Tensor, scaling: Scaling) -> Tensor:
    """beta_max: where w must end for its mean to be 1, or the cap."""
    top = scaling.low + (1 - scaling.low) / u.mean()
    return top if scaling.high is None else top.clamp(max=scaling.high)


def attention_weights(mass: Tensor, sizes: Tensor, mask: Tensor, rule: TokenWeighting) -> Tensor:
    """v [N, T] from the attention mass [N, T, 2] and each row's pool sizes [N, 2]: 1/VGR, smoothed, mean 1, clipped.

    Rows without vision tokens (or text tokens) get ones, and so do tokens off the mask.
    """
    weights = torch.ones(mask.shape, dtype=torch.float64)
    looking = 1 / vgr(mass.double(), sizes[:, None, :])
    applicable = (sizes > 0).all(1) & mask.any(1)
    for row in applicable.nonzero().flatten().tolist():
        v = gaussian_smooth(looking[row, mask[row]], rule.smooth_sigma)
        v = v / v.mean()
        clipped = v.clamp(*rule.clip)
        if rule.top_ratio is not None:  # ranked before the clip, which would make ties of the highest
            top = top_fraction(v[None], torch.ones(1, len(v), dtype=torch.bool), rule.top_ratio)[0]
            clipped = clipped.where(top, 1.0)
        weights[row, mask[row]] = clipped
    return weights.float()


def gaussian_smooth(x: Tensor, sigma: float) -> Tensor:
    """x [n] smoothed by a Gaussian of radius ceil(3 sigma), its edges replicated; sigma 0 leaves it as it is."""
    if sigma == 0:
        return x
    radius = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=x.dtype) / sigma) ** 2)
    padded = torch.cat([x[:1].expand(radius), x, x[-1:].expand(radius)])
    return padded.unfold(0, 2 * radius + 1, 1) @ (kernel / kernel.sum())
