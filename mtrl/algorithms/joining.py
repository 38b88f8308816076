"""Groups from several calls, or of several steps, in one experience.

A signal that some part lacks is lost to the whole (`Experience.join`). Two are not lost so, for their absence says
something: a reward function that brings token weights brought none for these rows, and attention is not read where
nobody looks at an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mtrl.types import SEGMENTS, Experience


def join_groups(parts: Sequence[Experience]) -> Experience:
    """All rows in one. Token weights of some parts are ones in the others; attention of rows without an image is 0,
    which nobody reads."""
    if any(part.rewards.token_weights is not None for part in parts):
        parts = [_weighted(part) for part in parts]
    if any(part.signals.attention_mass is not None for part in parts):
        parts = [_seen(part) for part in parts]
    return Experience.join(parts)


def _weighted(part: Experience) -> Experience:
    if part.rewards.token_weights is not None:
        return part
    return replace(part, rewards=replace(part.rewards, token_weights=torch.ones(part.rollouts.mask.shape)))


def _seen(part: Experience) -> Experience:
    if part.signals.attention_mass is not None or part.rollouts.visual.any():
        return part
    rows, width = part.rollouts.mask.shape
    mass, prompt_mass = torch.zeros(rows, width, len(SEGMENTS), 2), torch.zeros(rows, len(SEGMENTS), 2)
    return replace(part, signals=replace(part.signals, attention_mass=mass, prompt_attention_mass=prompt_mass))
