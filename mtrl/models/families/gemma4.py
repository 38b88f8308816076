"""Gemma 4: an image of any shape fills a budget of tokens; per-layer embeddings, shared keys, capped logits.

Its sizes differ more than those of other families, and the config says which parts a model has. Small ones (E2B, E4B)
are causal, have an embedding of every token for every layer, and last layers that read the keys and values of earlier
ones. In large ones (26B-A4B, 31B) tokens of an image see one another, in layers with a window alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.device_copy import to_device
from mtrl.models.families.model_family import ImageEncoder, ModelFamily
from mtrl.models.families.vision import SCALING, check_aspect, normalize, read_normalization
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.models.layer_kinds import SLIDING
from mtrl.protocols import ImageSettings, Schema
from mtrl.types import VISION_POOL, Prompt

BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image that transformers' processor takes
# Its defaults for keys that a processor_config.json lacks. The tower moves pixels from 0 .. 1 to -1 .. 1 itself.
IMAGE_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
    **SCALING,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}


class Gemma4Encoder(VisionEncoder):
    """Every image is scaled, up or down, to as many tokens as its shape and the budget allow. The budget is the
    checkpoint's `max_soft_tokens`, or the largest of BUDGETS within `max_pixels` if that is smaller."""

    marks = ("image", "boi", "eoi")
    media_tokens = ("<|video|>", "<|audio>", "<|audio|>", "<audio|>")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        begin, end = (str(tokenizer.convert_ids_to_tokens(each)) for each in (config.boi_token_id, config.eoi_token_id))
        self._expanded_mark = f"{begin}{self._marks['image']}{end}"

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        saved = IMAGE_DEFAULTS | {key: value for key, value in saved.items() if value is not None}
        patch, pool, vision = saved["patch_size"], saved["pooling_kernel_size"], config.vision_config
        if (patch, pool) != (vision.patch_size, vision.pooling_kernel_size):
            raise ValueError(
                f"the image settings have patches of {patch} pixels and tokens of {pool} x {pool} patches, config.json "
                f"{vision.patch_size} and {vision.pooling_kernel_size}; they do not belong together"
            )
        token, budget = (patch * pool) ** 2, saved["max_soft_tokens"]
        if max_pixels is not None:
            budget = min(budget, max((each for each in BUDGETS if each * token <= max_pixels), default=BUDGETS[0]))
        return ImageSettings(
            patch_size=patch,
            merge_size=pool,
            temporal_patch_size=1,
            min_pixels=token,
            max_pixels=budget * token,
            **read_normalization(saved),
        )

    @property
    def budget(self) -> int:
        """The most tokens of an image."""
        return self.image_settings.max_pixels // self.image_settings.factor**2

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
        side, scale = self.image_settings.factor, math.sqrt(self.image_settings.max_pixels / (height * width))
        rows, columns = (math.floor(scale * each / side) for each in (height, width))
        if not rows:  # so long that its shape cannot be kept
            rows, columns = 1, min(width // height, self.budget)
        elif not columns:
            rows, columns = min(height // width, self.budget), 1
        return rows * side, columns * side

    def largest_image(self, tokens: int) -> tuple[int, int]:
        return super().largest_image(min(tokens, self.budget))

    def pixels(self, array: np.ndarray, device: torch.device | None) -> Tensor:
        """[1, most patches, patch * patch * 3]: row by row, and so are the pixels of a patch."""
        image = normalize(to_device(torch.tensor(array), device).permute(2, 0, 1), self.image_settings)
        side = self.image_settings.patch_size
        grid = image.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # [3, rows, side, columns, side]
        return self._pad(grid.permute(1, 3, 2, 4, 0).flatten(0, 1).flatten(1), 0.0)

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """In addition mm_token_type_ids [L], 1 for image tokens, and image_position_ids [images, most patches, 2]: the
        column and the row of each patch, -1 for padding."""
        inputs = super().inputs(prompt, media, device)
        inputs["mm_token_type_ids"] = (prompt.token_pool == VISION_POOL).long()
        if prompt.media:
            side = self.image_settings.patch_size
            grids = [patch_positions(each.shape[0] // side, each.shape[1] // side) for each in prompt.media]
            inputs["image_position_ids"] = torch.cat([self._pad(each, -1) for each in grids])
        return inputs

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema] = ()) -> str:
        return super().render(messages, tools).replace(self._marks["image"], self._expanded_mark)

    def _pad(self, patches: Tensor, value: float) -> Tensor:
        """[1, most patches, ..]"""
        most = self.image_settings.max_pixels // self.image_settings.patch_size**2
        return F.pad(patches, (0, 0, 0, most - len(patches)), value=value)[None]


def patch_positions(rows: int, columns: int) -> Tensor:
    """[rows * columns, 2]: column and row of each patch, row by row."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)


class Gemma4ImageEncoder(ImageEncoder):
    arguments = ("pixel_values", "image_position_ids")
    narrows_pixels = False

    def blank(self) -> dict[str, Tensor]:
        """One token."""
        vision = self.model.config.vision_config
        positions = patch_positions(vision.pooling_kernel_size, vision.pooling_kernel_size)
        pixels = torch.zeros(1, len(positions), 3 * vision.patch_size**2)
        return {"pixel_values": pixels, "image_position_ids": positions[None]}


class Gemma4Family(ModelFamily):
    """A tower for sounds keeps its weights; nothing runs it."""

    encoder = Gemma4Encoder
    image_encoder = Gemma4ImageEncoder
    vision_tower = "model.vision_tower"
    projector = "model.embed_vision"
    unused_parts = ("model.audio_tower", "model.embed_audio")
    caps_logits = True
    sliding_windows = True
    shares_prefix = True
    runs_in_vllm = False  # it scales a resized image once more: other tokens for a tenth of the shapes up to 2:1

    def image_block_kinds(self, config: Any) -> Collection[str]:
        return (SLIDING,) if config.use_bidirectional_attention == "vision" else ()

    def explain_unsupported(self, config: Any) -> list[str]:
        reasons = ["experts"] if config.enable_moe_block else []
        return reasons + ["attention of text to later tokens"] * (config.use_bidirectional_attention == "all")

    def token_inputs(self, model: Any, ids: Tensor) -> dict[str, Tensor]:
        """The embeddings of every token for every layer, of models that have any. Those of padding stand for images."""
        language_model = self.find_language_model(model)
        if not language_model.hidden_size_per_layer_input:
            return {}
        ids = ids.masked_fill(ids == model.config.image_token_id, language_model.config.pad_token_id)
        return {"per_layer_inputs": language_model.get_per_layer_inputs(ids, None)}
