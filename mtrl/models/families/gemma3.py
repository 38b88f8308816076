"""Gemma 3: each picture is one square of a fixed number of tokens, which see one another; most layers have a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.families.model_family import ModelFamily
from mtrl.models.families.vision import PLAIN_PIXELS, check_aspect, read_normalization
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.protocols import ImageSettings, Schema
from mtrl.types import VISION_POOL, Prompt

# transformers' defaults for keys that a preprocessor_config.json lacks.
IMAGE_DEFAULTS: dict[str, Any] = {
    "size": {"height": 224, "width": 224},
    **PLAIN_PIXELS,
}


class Gemma3Encoder(VisionEncoder):
    """Every image is resized to the square that the vision tower takes, so limits of pixels do not apply.

    A template writes one mark for an image. The model reads more: two line breaks, the mark, the image's tokens, an end
    mark and two line breaks. They are added to the text, where line breaks merge with those beside them.
    """

    marks = ("image", "boi", "eoi")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        begin, end = (str(tokenizer.convert_ids_to_tokens(each)) for each in (config.boi_token_id, config.eoi_token_id))
        self._expanded_mark = f"\n\n{begin}{self._marks['image']}{end}\n\n"
        self._marks = {"image": begin}

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        saved = IMAGE_DEFAULTS | {key: value for key, value in saved.items() if value is not None}
        if saved.get("do_pan_and_scan"):
            raise ValueError(
                "its image settings ask for pan and scan, which adds crops of an image to the prompt and is not "
                "supported; set do_pan_and_scan to false in them"
            )
        vision, side = config.vision_config, saved["size"].get("height")
        if not side == saved["size"].get("width") == vision.image_size:
            raise ValueError(
                f"the image settings have the size {saved['size']}, config.json a square of {vision.image_size} "
                "pixels; they do not belong together"
            )
        patches, tokens = side // vision.patch_size, isqrt(config.mm_tokens_per_image)
        if tokens**2 != config.mm_tokens_per_image or side % (vision.patch_size * tokens):
            raise ValueError(
                f"an image has {config.mm_tokens_per_image} tokens and {patches} x {patches} patches of "
                f"{vision.patch_size} pixels; its tokens must be a square of whole patches"
            )
        return ImageSettings(
            patch_size=vision.patch_size,
            merge_size=patches // tokens,
            temporal_patch_size=1,
            min_pixels=side * side,
            max_pixels=side * side,
            **read_normalization(saved),
        )

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
        return self.largest_image(1)

    def largest_image(self, tokens: int) -> tuple[int, int]:
        side = isqrt(self.image_settings.max_pixels)
        return side, side

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """In addition token_type_ids [L], 1 for image tokens: transformers makes the mask of images of it."""
        kinds = (prompt.token_pool == VISION_POOL).long()
        return super().inputs(prompt, media, device) | {"token_type_ids": kinds}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema] = ()) -> str:
        return super().render(messages, tools).replace(self._marks["image"], self._expanded_mark)


class Gemma3Family(ModelFamily):
    """Embeddings of tokens are multiplied by the root of the width, in transformers' own module; features of images are
    not."""

    encoder = Gemma3Encoder
    vision_tower = "model.vision_tower"
    projector = "model.multi_modal_projector"
    sliding_windows = True
    image_blocks = True
    shares_prefix = True
    runs_in_vllm = False  # its CPU build lets tokens of an image see earlier ones alone; not run on a GPU
