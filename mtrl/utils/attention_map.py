"""The attention of a response on its images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The share of each response token's attention that every image token of the prompt gets, stored as
    `scale * (level / 255) ** 2`. The shares of a token sum to its vision mass."""

    levels: Tensor  # [tokens, image tokens] uint8
    scale: Tensor  # [tokens]

    @property
    def shares(self) -> Tensor:
        return self.scale[:, None] * (self.levels / 255).square()
