"""LLaVA-OneVision: a small copy of the image, then its tiles, of which the model reads what is no padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

from mtrl.models.families.model_family import Features, ImageEncoder, ModelFamily, tower_side
from mtrl.models.families.tiles import TiledEncoder, cut, shrink
from mtrl.models.families.vision import CLIP_PIXELS, check_aspect, read_normalization
from mtrl.protocols import ImageSettings
from mtrl.types import Medium, Prompt

Size = tuple[int, int]  # height, width
ANYRES = "anyres_max_"  # starts a `vision_aspect_ratio`; then comes the limit of tokens, in tiles
SLACK = 1.1  # a side may have so many times the tokens of the limit


class OnevisionEncoder(TiledEncoder):
    """An image is resized to fit into one of several canvases of whole tiles. This is its target size, without the
    padding around it: perturbations act on the image alone, and the small copy is made from it.

    Tokens are those of the copy, then the rows of all tiles together, with `image_newline` at the end of each. Rows or
    columns that are padding are left out; if more tokens are left than the limit, they are interpolated.
    """

    marks = ("image", "video")

    def __init__(self, tokenizer: Any, config: Any, image: ImageSettings, **options: Any) -> None:
        super().__init__(tokenizer, config, image, **options)
        self._tile_tokens = self.side // image.factor  # of a side
        self._most_tokens = int(config.vision_aspect_ratio.removeprefix(ANYRES)) * self._tile_tokens**2
        within = image.max_pixels - self.side**2
        canvases = [(height, width) for height, width in config.image_grid_pinpoints if height * width <= within]
        self._canvases = sorted(canvases, key=math.prod)  # equal ones in their order: the first is chosen

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: Any, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        saved = CLIP_PIXELS | {key: value for key, value in saved.items() if value is not None}
        side, canvases, size = tower_side(config), config.image_grid_pinpoints, saved.get("size") or {}
        if not side == size.get("height") == size.get("width") or any(
            each % side for pair in canvases for each in pair
        ):
            raise ValueError(
                f"the image settings have tiles of the size {size}, config.json images of {canvases}; both must be "
                f"whole squares of the {side} pixels that the vision tower takes"
            )
        if saved.get("image_grid_pinpoints", canvases) != canvases:
            raise ValueError("image_grid_pinpoints of the image settings and of config.json differ")
        kind, select = config.vision_aspect_ratio, config.vision_feature_select_strategy
        if not kind.removeprefix(ANYRES).isdecimal() or select != "full":
            raise ValueError(
                f"vision_aspect_ratio {kind!r} and vision_feature_select_strategy {select!r} are not supported; only "
                f"'{ANYRES}9', with any number, and 'full' are"
            )
        areas = [math.prod(each) + side**2 for each in canvases]
        return ImageSettings(
            patch_size=config.vision_config.patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=min(areas),
            max_pixels=max(min(max_pixels or max(areas), max(areas)), min(areas)),
            **read_normalization(saved),
        )

    # ---------------------------------------------------------------------------------------------------------- sizes
    def sizes(self) -> list[Size]:
        return self._canvases

    def target_size(self, height: int, width: int) -> Size:
        """As transformers', which rounds up; one pixel less where that would add a token that the image lacks."""
        check_aspect(height, width)
        canvas = self._choose_canvas(height, width)
        across, down = canvas[1] / width, canvas[0] / height
        if across < down:
            target = min(math.ceil(height * across), canvas[0]), canvas[1]
            smaller = target[0] - 1, canvas[1]
        else:
            target = canvas[0], min(math.ceil(width * down), canvas[1])
            smaller = canvas[0], target[1] - 1
        return target if self._count_kept(*target) == self._count_kept(height, width) else smaller

    def visible_size(self, height: int, width: int) -> Size:
        """The squares that the tower reads, one below the other: the copy, then the tiles."""
        return math.prod(self._choose_canvas(height, width)) // self.side + self.side, self.side

    def count_image_tokens(self, height: int, width: int) -> int:
        rows, columns = self._count_lines(height, width)
        return self._tile_tokens**2 + rows * (columns + 1)

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        return self.count_image_tokens(height, width)

    def _choose_canvas(self, height: int, width: int) -> Size:
        """The canvas that shows most pixels of the image; of equal ones the smallest, as in transformers."""

        def count_shown(canvas: Size) -> int:
            scale = min(canvas[0] / height, canvas[1] / width)
            return min(int(height * scale) * int(width * scale), height * width)

        return max(self._canvases, key=lambda canvas: (count_shown(canvas), -math.prod(canvas)))

    def _count_kept(self, height: int, width: int) -> Size:
        """The rows and columns of the tokens of all tiles that are no padding. As transformers counts them: as many
        are left out on both sides."""
        rows, columns = (each // self.side * self._tile_tokens for each in self._choose_canvas(height, width))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def _count_lines(self, height: int, width: int) -> Size:
        """The rows and columns of tokens, interpolated if they are too many."""
        rows, columns = self._count_kept(height, width)
        ratio = math.sqrt(rows * columns / self._most_tokens)
        return (int(rows // ratio), int(columns // ratio)) if ratio > SLACK else (rows, columns)

    # --------------------------------------------------------------------------------------------------------- pixels
    def visible_part(self, medium: np.ndarray) -> np.ndarray:
        """The copy and the tiles. The image is in the centre of its canvas, on black."""
        sizes = zip(self._choose_canvas(*medium.shape[:2]), medium.shape[:2], strict=True)
        missing = [canvas - size for canvas, size in sizes]
        canvas = np.pad(medium, [*((each // 2, each - each // 2) for each in missing), (0, 0)])
        return np.concatenate([shrink(medium, self.side, self.filter), *cut(canvas, self.side)])

    def pictures(self, medium: np.ndarray) -> list[np.ndarray]:
        """The copy, and the lines of tokens with black for their ends."""
        size, token = medium.shape[:2], self.image_settings.factor
        seen = self._tile_tokens * token  # the rest of a square is no whole token
        copy, *tiles = (square[:seen, :seen] for square in cut(self.visible_part(medium), self.side))
        in_row = self._choose_canvas(*size)[1] // self.side
        canvas = np.concatenate([np.concatenate(tiles[at : at + in_row], 1) for at in range(0, len(tiles), in_row)])
        height, width = (each * token for each in self._count_kept(*size))
        high, wide = (each * token for each in self._count_lines(*size))
        top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
        lines = canvas[top : top + height, left : left + width]
        if (high, wide) != (height, width):
            lines = np.asarray(Image.fromarray(lines).resize((wide, high)))
        return [copy, np.pad(lines, [(0, 0), (0, token), (0, 0)])][: 1 + (high > 0)]  # a very flat image has no line

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """position_ids [L], pixel_values [images, most tiles, 3, side, side], filled up with zeros as in
        transformers, and image_sizes [images, 2]."""
        inputs = {"position_ids": torch.arange(len(prompt.ids))}
        if media := self._check_view(prompt, media):
            inputs["pixel_values"] = pad_sequence([self.pixels(array, device) for array in media], batch_first=True)
            inputs["image_sizes"] = torch.tensor([self._check_array(array) for array in media])
        return inputs

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self._canvases, self._most_tokens]


class OnevisionImageEncoder(ImageEncoder):
    """transformers leaves out padding and interpolates, by the sizes of the images."""

    def encode(self, inputs: Sequence[dict[str, Tensor]], device: torch.device) -> list[Features]:
        sizes = torch.cat([each["image_sizes"] for each in inputs])
        images = (image for each in inputs for image in each["pixel_values"])
        tiles = [image[: self._count_tiles(size)] for image, size in zip(images, sizes, strict=True)]
        pixels = torch.cat(tiles).to(device, self.tower.dtype)
        found = self.model.model.get_image_features(pixels, image_sizes=sizes, return_dict=True).pooler_output
        by_prompt = iter(found)
        return [Features(torch.cat([next(by_prompt) for _ in each["image_sizes"]])) for each in inputs]

    def blank(self) -> dict[str, Tensor]:
        size = torch.tensor([min(self.model.config.image_grid_pinpoints, key=math.prod)])
        side = tower_side(self.model.config)
        return {"pixel_values": torch.zeros(1, self._count_tiles(size[0]), 3, side, side), "image_sizes": size}

    def _count_tiles(self, size: Tensor) -> int:
        config = self.model.config
        return image_size_to_num_patches(size, config.image_grid_pinpoints, tower_side(config))


class OnevisionFamily(ModelFamily):
    """The language model is Qwen2, causal with one axis of positions."""

    encoder = OnevisionEncoder
    image_encoder = OnevisionImageEncoder
    vision_tower = "model.vision_tower"
    projector = "model.multi_modal_projector"
    shares_prefix = True
    vllm_names = MappingProxyType({"model.vision_tower.": "model.vision_tower.vision_model."})
