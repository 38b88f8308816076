"""Joins groups of several calls, or of several steps, into one experience.

`join_rows` drops a field that some part lacks. Two fields have a default instead: token weights are ones for rows
whose reward function returned none, and attention is 0 for rows without an image, for which it is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mtrl.types import SEGMENTS, Experience
from mtrl.utils.record_rows import join_rows


def join_groups(parts: Sequence[Experience]) -> Experience:
    """Join all rows, with default token weights and attention where a part lacks them."""
    if any(part.rewards.token_weights is not None for part in parts):
        parts = [_with_token_weights(part) for part in parts]
    if any(part.signals.attention_mass is not None for part in parts):
        parts = [_with_attention(part) for part in parts]
    return join_rows(parts)


def _with_token_weights(part: Experience) -> Experience:
    if part.rewards.token_weights is not None:
        return part
    return replace(part, rewards=replace(part.rewards, token_weights=torch.ones(part.rollouts.mask.shape)))


def _with_attention(part: Experience) -> Experience:
    if part.signals.attention_mass is not None or part.rollouts.visual.any():
        return part
    rows, width = part.rollouts.mask.shape
    mass, prompt_mass = torch.zeros(rows, width, len(SEGMENTS), 2), torch.zeros(rows, len(SEGMENTS), 2)
    return replace(part, signals=replace(part.signals, attention_mass=mass, prompt_attention_mass=prompt_mass))
