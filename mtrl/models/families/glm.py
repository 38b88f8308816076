"""GLM-4.1V: images of any size as Qwen's, with positions in three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.device_copy import to_device
from mtrl.models.families.model_family import ModelFamily
from mtrl.models.families.qwen_tower import Grid, QwenImageEncoder
from mtrl.models.families.qwen_vl import QwenVLEncoder
from mtrl.models.families.vision import patchify, rotary_positions, target_size
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.protocols import ImageSettings
from mtrl.types import Prompt, content_text


class GlmEncoder(VisionEncoder):
    marks = ("image", "image_start", "image_end", "video", "video_start", "video_end")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any, image: ImageSettings, **options: Any) -> None:
        super().__init__(tokenizer, config, image, **options)
        around: Any = tokenizer.convert_ids_to_tokens([config.image_start_token_id, config.image_end_token_id])
        self._marks = {"image": self._marks["image"].join(around)}

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        """The limits of a checkpoint count the pixels of each patch's frames, of which an image fills all."""
        size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000} | (saved.get("size") or {})
        frames = saved.get("temporal_patch_size") or 2
        limits = {name: pixels // frames for name, pixels in size.items()}
        return QwenVLEncoder.read_image_settings({**saved, "size": limits}, config, min_pixels, max_pixels)

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        factor = self.image_settings.factor
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return target_size(height, width, self.image_settings)

    def engine_image_arguments(self) -> dict[str, Any]:
        images = self.image_settings
        limits = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
        return {
            "do_resize": False,
            "size": {name: pixels * images.temporal_patch_size for name, pixels in limits.items()},
        }

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """As QwenVLEncoder's: position_ids [3, L], mm_token_type_ids [L], pixel_values, image_grid_thw."""
        media, images = self._check_view(prompt, media), self.image_settings
        sizes = [self._check_array(array) for array in media]
        is_image = self._is_pad(prompt.ids)
        positions = rotary_positions(is_image, [(h // images.factor, w // images.factor) for h, w in sizes])
        inputs = {"position_ids": positions, "mm_token_type_ids": is_image.long()}
        if media:
            inputs["pixel_values"] = torch.cat([patchify(array, images, device) for array in media])
            patches = [(1, h // images.patch_size, w // images.patch_size) for h, w in sizes]
            inputs["image_grid_thw"] = torch.tensor(patches)
        return inputs

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Contents of the system and the assistant are texts: the template of GLM-4.1V writes them as they are, and a
        list of parts would be Python code."""
        return [
            message if message["role"] == "user" or any(part["type"] != "text" for part in message["content"])
            else {**message, "content": content_text(message["content"])}
            for message in super()._for_template(messages)
        ]  # fmt: skip

    def _settings(self) -> list[Any]:
        return [*super()._settings(), "texts"]


class GlmImageEncoder(QwenImageEncoder):
    def run_tower(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Any:
        """The grids are on the device: this tower looks up the size of each patch's image in them."""
        indices = self.vision_indices(grids, pixels.device)
        return self.tower(pixels.to(self.tower.dtype), grid_thw=torch.tensor(grids, device=pixels.device), **indices)


def move_lengths(_embeddings: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The lengths of the images, which `vision_indices` keeps on the CPU for attention, to the device of the patches:
    this tower compares them with places there."""
    patches, lengths, *others = arguments
    return patches, to_device(lengths, patches.device), *others


class GlmFamily(ModelFamily):
    encoder = GlmEncoder
    image_encoder = GlmImageEncoder
    vision_tower = "model.visual"
    vision_layers = "blocks"
    position_axes = 3
    shares_prefix = True

    def prepare_tower(self, tower: Any, *, narrow_cuda: bool) -> None:
        tower.embeddings.register_forward_pre_hook(move_lengths)

    def explain_no_vllm(self, config: Any) -> str | None:
        if not getattr(config.text_config, "attention_bias", False):  # transformers has these biases without the key
            return 'without "attention_bias": true in the text_config of its config.json, vLLM leaves out biases'
        return super().explain_no_vllm(config)


class GlmMoeFamily(GlmFamily):
    """GLM-4.5V, with experts."""

    runs_in_vllm = False  # log-probs of its CPU build are 7 nats off from the start; the cause was not found
