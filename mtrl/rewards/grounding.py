"""Built-in rewards for the attention of the late layers on the image: mdi, vgr, vgr_hard_negative (SPEC 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import Tensor

from mtrl.algorithms.rewards import VGR_ROUNDING, Normalizer, mdi_reward, vgr_hard_negative_reward, vgr_reward
from mtrl.rewards.builtin import accuracy
from mtrl.rewards.outcomes import Outcome, completed_future
from mtrl.types import Needs

SEGMENT = "vgr_late"

Sample = Mapping[str, Any]
Compare = Callable[[Tensor, Tensor, Sequence[Sample]], Tensor]  # VGR [N], group [N] and the samples -> rewards [N]


class AttentionReward:
    """Compares responses by their VGR; a response without one (no image, no attention measured) gets no reward."""

    needs = Needs("attention_mass")

    def __init__(self, compare: Compare) -> None:
        self.compare = compare

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        vgr = torch.tensor([sample["signals"].get(SEGMENT, math.nan) for sample in samples])
        prompts = torch.arange(len(samples)) if group is None else torch.tensor(group)
        rewards = self.compare(vgr, prompts, samples).tolist()
        return [completed_future(Outcome(None if math.isnan(reward) else reward)) for reward in rewards]

    def close(self) -> None: ...


def mdi(ratio: float) -> AttentionReward:
    return AttentionReward(lambda vgr, group, samples: mdi_reward(vgr, ratio))


def vgr(normalizer: Normalizer, dtype: str) -> AttentionReward:
    rounding = VGR_ROUNDING[dtype]
    return AttentionReward(lambda vgr, group, samples: vgr_reward(vgr, group, normalizer, rounding))


def vgr_hard_negative(normalizer: Normalizer, pool: Literal["correct", "group"], dtype: str) -> AttentionReward:
    """It computes accuracy itself, so accuracy need not be one of the rewards."""
    rounding = VGR_ROUNDING[dtype]

    def compare(vgr: Tensor, group: Tensor, samples: Sequence[Sample]) -> Tensor:
        right = torch.tensor([accuracy(sample) or 0.0 for sample in samples])
        return vgr_hard_negative_reward(vgr, right, group, normalizer, pool, rounding)

    return AttentionReward(compare)
