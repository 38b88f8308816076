"""Idefics3 and SmolVLM: tiles with their row and column in front, and a small copy of the image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mtrl.models.families.model_family import Features, ImageEncoder, ModelFamily, tower_side
from mtrl.models.families.tiles import TiledEncoder, count_squares
from mtrl.models.families.vision import PLAIN_PIXELS, check_aspect, read_normalization
from mtrl.protocols import ImageSettings
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Medium, Prompt

# transformers' defaults for keys that a preprocessor_config.json lacks.
IMAGE_DEFAULTS: dict[str, Any] = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    **PLAIN_PIXELS,
}
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
MOST_TILES = 6  # in a row or a column: the tokenizers have marks for so many


class IdeficsEncoder(TiledEncoder):
    """The longer side of every image gets the pixels that the settings say, or fewer if a square image would pass
    `max_pixels`."""

    filter = Image.Resampling.LANCZOS
    media_tokens = (
        AROUND, WHOLE, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )  # fmt: skip

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: Any, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        saved = IMAGE_DEFAULTS | {key: value for key, value in saved.items() if value is not None}
        side, cut, longest = tower_side(config), saved["max_image_size"], saved["size"].get("longest_edge") or 0
        if cut.get("longest_edge") != side or longest % side or not 0 < longest <= MOST_TILES * side:
            raise ValueError(
                f"the image settings have tiles of the size {cut} and images of the size {saved['size']}; tiles must "
                f"have the {side} pixels that the vision tower takes, and an image 1 to {MOST_TILES} of them in a row"
            )
        if not saved["do_image_splitting"]:
            longest = side
        if max_pixels is not None:
            longest = max(side, min(longest, math.isqrt(max(0, max_pixels - side**2)) // side * side))
        return ImageSettings(
            patch_size=config.vision_config.patch_size,
            merge_size=config.scale_factor,
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=count_squares((longest // side) ** 2) * side**2,
            **read_normalization(saved),
        )

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """The longer side has its number of tiles, the shorter one as many as the shape needs."""
        check_aspect(height, width)
        longest = self.sizes()[0][1]
        shape = width / height
        shorter = int(longest / shape if shape >= 1 else longest * shape)
        shorter = max(1, -(-(shorter + shorter % 2) // self.side)) * self.side
        return (shorter, longest) if shape >= 1 else (longest, shorter)

    def sizes(self) -> list[tuple[int, int]]:
        longest = math.isqrt(self.image_settings.max_pixels) // self.side * self.side
        return [(shorter, longest) for shorter in range(self.side, longest + 1, self.side)]

    def engine_image_arguments(self) -> dict[str, Any]:
        return super().engine_image_arguments() | {"size": {"longest_edge": self.sizes()[0][1]}}

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """pixel_values [1, tiles, 3, side, side], as transformers batches rows with several tiles."""
        inputs = super().inputs(prompt, media, device)
        return inputs | {name: each[None] for name, each in inputs.items() if name == "pixel_values"}

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        return len(self._expand(medium, height, width)[0])

    def _expand(self, medium: Medium, height: int, width: int) -> tuple[Tensor, Tensor]:
        tile = (self.side // self.image_settings.factor) ** 2 * self._marks["image"]
        text = AROUND + WHOLE + tile + AROUND
        rows, columns = height // self.side, width // self.side
        if rows * columns > 1:
            marks = [[f"{AROUND}<row_{r}_col_{c}>{tile}" for c in range(1, columns + 1)] for r in range(1, rows + 1)]
            text = "".join("".join(row) + "\n" for row in marks) + "\n" + text
        ids = torch.tensor(self._backend.encode(text, add_special_tokens=False).ids)
        pool = torch.full_like(ids, TEXT_POOL)
        if not self._pool_special:
            pool[torch.isin(ids, self._special_ids)] = NO_POOL
        pool[ids == self._pad_ids["image"]] = VISION_POOL
        return ids, pool


class IdeficsImageEncoder(ImageEncoder):
    """`get_image_features` takes tiles whose values are all 0 for padding and drops them; no tile is padding here."""

    def encode(self, inputs: Sequence[dict[str, Tensor]], device: torch.device) -> list[Features]:
        tiles = [each["pixel_values"][0] for each in inputs]
        states = self.tower(torch.cat(tiles).to(device, self.tower.dtype)).last_hidden_state
        features = self.model.model.connector(states).split([len(each) for each in tiles])
        return [Features(each.flatten(0, 1)) for each in features]

    def blank(self) -> dict[str, Tensor]:
        return {name: each[None] for name, each in super().blank().items()}


class IdeficsFamily(ModelFamily):
    """The language model is Llama, causal with one axis of positions."""

    encoder = IdeficsEncoder
    image_encoder = IdeficsImageEncoder
    vision_tower = "model.vision_model"
    vision_layers = "encoder.layers"
    projector = "model.connector"
    shares_prefix = True

    def find_language_model(self, model: Any) -> Any:
        return model.model.text_model
