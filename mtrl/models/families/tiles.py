"""Images that are cut into square tiles, because the vision tower reads squares of one size.

An image is resized to a grid of squares; this is its target size, and perturbations act on it. The tiles are cut from
it row by row. If there are several, a small copy of the whole image follows, which is made from the grid too. Limits of
pixels are those of all squares, the copy included.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.device_copy import to_device
from mtrl.models.families.model_family import tower_side
from mtrl.models.families.vision import normalize
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.protocols import ImageSettings


class TiledEncoder(VisionEncoder):
    """The base of prompt encoders for tiles. Families override `target_size` and `sizes`."""

    filter: ClassVar[Image.Resampling] = Image.Resampling.BICUBIC  # of the small copy

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        self.side = tower_side(config)

    def sizes(self) -> list[tuple[int, int]]:
        """The (height, width) of all grids within the limits, small ones first."""
        raise NotImplementedError

    def largest_image(self, tokens: int) -> tuple[int, int]:
        smallest, *others = self.sizes()
        return next((size for size in reversed(others) if self.count_image_tokens(*size) <= tokens), smallest)

    def visible_size(self, height: int, width: int) -> tuple[int, int]:
        """The squares that the tower reads, one below the other: its tokens are in this order."""
        return count_squares(height * width // self.side**2) * self.side, self.side

    def visible_part(self, medium: np.ndarray) -> np.ndarray:
        tiles = cut(medium, self.side)
        return np.concatenate(tiles if len(tiles) == 1 else [*tiles, shrink(medium, self.side, self.filter)])

    def engine_image_arguments(self) -> dict[str, Any]:
        """Pillow makes the small copy, as here: torchvision rounds some of its pixels otherwise. The flag's new name,
        `backend="pil"`, also asks for a video processor by Pillow, and there is none."""
        return {"use_fast": False}

    def pixels(self, array: np.ndarray, device: torch.device | None) -> Tensor:
        """[tiles, 3, side, side]"""
        column = to_device(torch.tensor(self.visible_part(array)), device)
        return normalize(column.unflatten(0, (-1, self.side)).permute(0, 3, 1, 2), self.image_settings)

    def count_image_tokens(self, height: int, width: int) -> int:
        """Tokens of an image at its target size, without marks."""
        return math.prod(self.visible_size(height, width)) // self.image_settings.factor**2


def count_squares(tiles: int) -> int:
    """Tiles, and the copy of the image if there are several."""
    return tiles + (tiles > 1)


def cut(image: np.ndarray, side: int) -> list[np.ndarray]:
    """The tiles of an image, row by row."""
    height, width = image.shape[:2]
    corners = [(top, left) for top in range(0, height, side) for left in range(0, width, side)]
    return [image[top : top + side, left : left + side] for top, left in corners]


def shrink(image: np.ndarray, side: int, resample: Image.Resampling) -> np.ndarray:
    """[side, side, 3]: the whole image; values that are no bytes (of noised views) are not clipped."""
    layers = [image] if image.dtype == np.uint8 else list(image.transpose(2, 0, 1))
    small = [np.asarray(Image.fromarray(each).resize((side, side), resample)) for each in layers]
    return small[0] if len(small) == 1 else np.stack(small, -1)
