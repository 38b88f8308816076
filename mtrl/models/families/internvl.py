"""InternVL 3 and 3.5, as transformers has them: up to twelve tiles and a small copy of the image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.families.model_family import ModelFamily, tower_side
from mtrl.models.families.tiles import TiledEncoder, count_squares
from mtrl.models.families.vision import CLIP_PIXELS, check_aspect, read_normalization
from mtrl.protocols import ImageSettings
from mtrl.types import NO_POOL, TEXT_POOL, Medium

# transformers' defaults for keys that a preprocessor_config.json lacks.
IMAGE_DEFAULTS: dict[str, Any] = {
    "min_patches": 1,
    "max_patches": 12,
    **CLIP_PIXELS,
}
BEGIN, END = "<img>", "</img>"


class InternVLEncoder(TiledEncoder):
    media_tokens = (BEGIN, END)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        self._around: Any = tokenizer.convert_tokens_to_ids([BEGIN, END])

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        saved = IMAGE_DEFAULTS | {key: value for key, value in saved.items() if value is not None}
        side, size = tower_side(config), saved.get("size") or {}
        if not side == size.get("height") == size.get("width"):
            raise ValueError(
                f"the image settings have tiles of the size {size}, but the vision tower takes squares of {side} pixels"
            )
        lowest, highest = (count_squares(saved[name]) * side**2 for name in ("min_patches", "max_patches"))
        return ImageSettings(
            patch_size=config.vision_config.patch_size[0],
            merge_size=round(1 / config.downsample_ratio),
            temporal_patch_size=1,
            min_pixels=min(max(min_pixels or lowest, lowest), highest),
            max_pixels=max(min(max_pixels or highest, highest), lowest),
            **read_normalization(saved),
        )

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """The grid whose shape is nearest; of equal ones the largest with less than twice the pixels of the image."""
        check_aspect(height, width)
        best, distance = (self.side, self.side), math.inf
        for size in self.sizes():
            gap = abs(width / height - size[1] / size[0])
            if gap < distance or (gap == distance and math.prod(size) < 2 * height * width):
                best, distance = size, gap
        return best

    def sizes(self) -> list[tuple[int, int]]:
        side, images = self.side, self.image_settings
        numbers = range(1, images.max_pixels // side**2 + 1)
        grids = [(rows * side, columns * side) for columns in numbers for rows in numbers]
        pixels = {each: math.prod(self.visible_size(*each)) for each in grids}
        fitting = [each for each in grids if images.min_pixels <= pixels[each] <= images.max_pixels]
        return sorted(fitting, key=math.prod) or [(side, side)]  # limits may lie between two grids

    def engine_image_arguments(self) -> dict[str, Any]:
        tiles = [math.prod(size) // self.side**2 for size in self.sizes()]
        return super().engine_image_arguments() | {"min_patches": min(tiles), "max_patches": max(tiles)}

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        return self.count_image_tokens(height, width) + len(self._around)

    def _expand(self, medium: Medium, height: int, width: int) -> tuple[Tensor, Tensor]:
        ids, pool = super()._expand(medium, height, width)
        ids[[0, -1]], pool[[0, -1]] = torch.tensor(self._around), TEXT_POOL if self._pool_special else NO_POOL
        return ids, pool


class InternVLFamily(ModelFamily):
    """The language model is Qwen2 or Qwen3, causal with one axis of positions."""

    encoder = InternVLEncoder
    vision_tower = "model.vision_tower"
    vision_layers = "encoder.layer"
    projector = "model.multi_modal_projector"
    shares_prefix = True
