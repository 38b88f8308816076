"""A vision-language model of a family that nobody described: prompts and pixels by the checkpoint's own Processor,
features by `get_image_features` of transformers, every response with its own copy of the prompt.

Nothing is known to be right here, so a run compares it with transformers' plain forward before its first step
(`models/plain_check.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.families.model_family import Features, ImageEncoder, ModelFamily
from mtrl.models.families.vision import check_aspect
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.protocols import ImageSettings
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Medium, Prompt

PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")  # outputs of a Processor


class ProcessorEncoder(VisionEncoder):
    """A PromptEncoder that has each image expanded and its pixels computed by the checkpoint's Processor.

    A picture is given to the Processor in its own size, unless it has more pixels than the limit.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PreTrainedConfig,
        image: ImageSettings,
        processor: Any,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        self.processor = processor
        self._feature_id = self._pad_ids["image"]
        mark = processor.image_token  # what a template writes for an image; some expansions have other tokens inside
        pad: Any = tokenizer.convert_tokens_to_ids(mark)
        self._pad_ids, self._marks, self._image_token = {"image": pad}, {"image": mark}, mark
        other = [getattr(config, "video_token_id", None)]
        self.forbidden_ids = tuple(sorted({*self.forbidden_ids, pad, *(each for each in other if each is not None)}))
        self._expansions: dict[tuple[int, int], list[int]] = {}

    @classmethod
    def from_checkpoint(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        config: PreTrainedConfig,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> ProcessorEncoder:
        from transformers import AutoImageProcessor, AutoProcessor  # they import much, which other families do not need

        name = f"{path} is of the family {config.model_type!r}, which is not described"
        try:
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
            # The same pixels on every machine, whether torchvision is installed or not.
            images = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
            processor.image_processor = images
        except Exception as error:  # a missing library (torchvision, for Processors that take videos) or any other
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{name}, and its Processor cannot be loaded ({reason:.200}); {HOW_TO_ADD}") from error
        patch = getattr(config.vision_config, "patch_size", 14)
        image = ImageSettings(  # of these the Processor has its own; a patch is what perturbations blacken
            patch_size=patch if isinstance(patch, int) else patch[0], merge_size=1, temporal_patch_size=1,
            min_pixels=1, max_pixels=max_pixels or 2**22, rescale_factor=1.0, image_mean=(0.0,) * 3,
            image_std=(1.0,) * 3,
        )  # fmt: skip
        try:
            return cls(tokenizer, config, image, processor, **options)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{name}: {error}; {HOW_TO_ADD}") from error

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
        shrink = min(1.0, (self.image_settings.max_pixels / (height * width)) ** 0.5)
        return max(1, int(height * shrink)), max(1, int(width * shrink))

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        return len(self._find_expansion(height, width))

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """position_ids [L], for images what the Processor returns, and token_type_ids if a mask is made of them."""
        inputs = {"position_ids": torch.arange(len(prompt.ids))}
        if "token_type_ids" in self.processor.model_input_names:
            inputs["token_type_ids"] = (prompt.token_pool == VISION_POOL).long()
        if media := self._check_view(prompt, media):
            given = self._process(len(media) * self._marks["image"], media, whole=False)
            inputs |= {name: value for name, value in given.items() if name not in PER_TOKEN}
        return inputs

    def plain_inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """Everything that the Processor returns for the whole prompt, its own tokens among it."""
        return self._process(self._tokens(prompt.task, len(prompt.media)).text, prompt.media, whole=True)

    # --------------------------------------------------------------------------------------------------------- helpers
    def _process(self, text: str, media: Sequence[np.ndarray], whole: bool) -> dict[str, Tensor]:
        """What the Processor returns. A `whole` prompt without a template gets what the tokenizer adds (a BOS)."""
        images = {"images": [Image.fromarray(array) for array in media]} if media else {}
        add = whole and self.chat_template is None
        return dict(self.processor(text=text, **images, add_special_tokens=add, return_tensors="pt"))

    def _find_expansion(self, height: int, width: int) -> list[int]:
        """The tokens of an image of this size."""
        if (height, width) not in self._expansions:
            given = self._process(self._marks["image"], [np.zeros((height, width, 3), np.uint8)], whole=False)
            self._expansions[height, width] = given["input_ids"][0].tolist()
        return self._expansions[height, width]

    def _expand(self, medium: Medium, height: int, width: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(self._find_expansion(height, width))
        pool = torch.full_like(ids, TEXT_POOL)
        if not self._pool_special:
            pool[torch.isin(ids, self._special_ids)] = NO_POOL
        pool[ids == self._feature_id] = VISION_POOL
        return ids, pool

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self.processor.to_json_string()]


class ProcessorImageEncoder(ImageEncoder):
    """Images of one prompt after the other: Processors pad the images of a batch in ways that only they know."""

    def encode(self, inputs: Sequence[dict[str, Tensor]], device: torch.device) -> list[Features]:
        return [Features(self._encode_prompt(each, device)) for each in inputs]

    def _encode_prompt(self, inputs: dict[str, Tensor], device: torch.device) -> Tensor:
        get_image_features = self.model.model.get_image_features
        accepted = signature(get_image_features).parameters
        arguments = {name: value.to(device) for name, value in inputs.items() if name in accepted}
        arguments["pixel_values"] = arguments["pixel_values"].to(self.tower.dtype)
        images = get_image_features(**arguments, return_dict=True).pooler_output
        images = [images] if isinstance(images, Tensor) else images
        return torch.cat([each.flatten(0, -2) for each in images])


class UndescribedFamily(ModelFamily):
    """Language model and vision tower are found by transformers' names for them."""

    encoder = ProcessorEncoder
    image_encoder = ProcessorImageEncoder
    runs_in_vllm = False  # its prompts are made by a Processor that is not described here

    def find_language_model(self, model: Any) -> Any:
        return model.get_decoder()

    def find_vision_tower(self, model: Any) -> Any:
        return model.get_encoder(modality="image")


HOW_TO_ADD = "docs/extending.md says how to add a family"
