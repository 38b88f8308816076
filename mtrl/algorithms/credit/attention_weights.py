"""Token weights by attention (SPEC 2.1): tokens that attend to the image count for more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Target, Weight
from mtrl.algorithms.groups import top_fraction
from mtrl.algorithms.signals import pool_sizes, segment, vgr
from mtrl.types import Experience, Needs


@dataclass(frozen=True)
class AttentionWeights(Weight):
    """v [N, T] = 1/VGR, smoothed, mean 1, clipped; or the weights that a reward function returned. With
    `compute_attention_metrics=False` attention is not read and a reward function must return the weights."""

    token_weight_target: Target = field(default="advantage", metadata={"old_name": "target"})
    token_weight_clip: tuple[float, float] = field(default=(0.2, 3.0), metadata={"old_name": "clip"})
    token_weight_smooth_sigma: float = field(default=0.0, metadata={"old_name": "smooth_sigma"})
    token_weight_top_ratio: float | None = field(default=None, metadata={"old_name": "top_ratio"})
    compute_attention_metrics: bool | Literal["auto"] = field(default="auto", metadata={"old_name": "attention"})

    @property
    def target(self) -> Target:  # type: ignore[override]
        return self.token_weight_target

    @property
    def needs(self) -> Needs:
        return Needs() if self.compute_attention_metrics is False else Needs("attention_mass")

    def apply(self, experience: Experience, key: Key) -> Tensor | None:
        rollouts, mass = experience.rollouts, experience.signals.attention_mass
        if experience.rewards.token_weights is not None or mass is None:
            return experience.rewards.token_weights
        return self.weights(segment(mass, "weight"), pool_sizes(rollouts.prompts)[rollouts.group], rollouts.mask)

    def weights(self, mass: Tensor, sizes: Tensor, mask: Tensor) -> Tensor:
        """v [N, T] from the attention mass [N, T, 2] and each row's pool sizes [N, 2].

        Rows without vision tokens (or text tokens) get ones, and so do tokens off the mask.
        """
        weights = torch.ones(mask.shape, dtype=torch.float64)
        inverse_vgr = 1 / vgr(mass.double(), sizes[:, None, :])
        applicable = (sizes > 0).all(1) & mask.any(1)
        for row in applicable.nonzero().flatten().tolist():
            v = gaussian_smooth(inverse_vgr[row, mask[row]], self.token_weight_smooth_sigma)
            v = v / v.mean()
            clipped = v.clamp(*self.token_weight_clip)
            if self.token_weight_top_ratio is not None:  # ranked before clipping, which would tie the highest
                top = top_fraction(v[None], torch.ones(1, len(v), dtype=torch.bool), self.token_weight_top_ratio)[0]
                clipped = clipped.where(top, 1.0)
            weights[row, mask[row]] = clipped
        return weights.float()


def gaussian_smooth(x: Tensor, sigma: float) -> Tensor:
    """x [n] smoothed by a Gaussian of radius ceil(3 sigma), with replicated edges; sigma 0 returns it unchanged."""
    if sigma == 0:
        return x
    radius = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=x.dtype) / sigma) ** 2)
    padded = torch.cat([x[:1].expand(radius), x, x[-1:].expand(radius)])
    return padded.unfold(0, 2 * radius + 1, 1) @ (kernel / kernel.sum())
