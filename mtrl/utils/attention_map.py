"""Where a response looks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Where on its images a response looks: for each of its tokens the share of its attention that every image token of
    the prompt gets, `scale * (level / 255) ** 2`. A token's shares sum up to its vision mass."""

    levels: Tensor  # [tokens, image tokens] uint8
    scale: Tensor  # [tokens]

    @property
    def shares(self) -> Tensor:
        return self.scale[:, None] * (self.levels / 255).square()
