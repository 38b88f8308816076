"""Encode a task with images: the part that the prompt encoders of all vision-language families share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.checkpoint_files import read_checkpoint_json
from mtrl.models.device_copy import to_device
from mtrl.models.families.message_parts import check_marks, content_parts
from mtrl.models.families.text import Rendered, TextEncoder
from mtrl.models.families.vision import normalize
from mtrl.models.families.written_tokens import Placeholders, iter_strings
from mtrl.protocols import ImageSettings
from mtrl.types import VISION_POOL, Medium, Prompt, Task


class VisionEncoder(TextEncoder):
    """A PromptEncoder for a model that takes images. The chat template writes one placeholder token (pad) for each
    image; `encode` replaces it by as many as the image has tokens.

    A family overrides `read_image_settings` and `target_size`, and `visible_size` if the model sees only the centre of
    an image at its target size. Tokens are squares of `image_settings.factor` pixels; pixel values are normalised.

    `forbidden_ids`: the tokens of `marks` in config.json and the `media_tokens`. A response with one of them would ask
    a later pass for an image that does not exist.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image",)  # media that the family takes
    marks: ClassVar[tuple[str, ...]] = ("image",)  # config.json has the id of each as <name>_token_id
    media_tokens: ClassVar[tuple[str, ...]] = ()

    image_settings: ImageSettings

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, **options)
        self.image_settings = image
        self._pad_ids: dict[str, int] = {kind: getattr(config, f"{kind}_token_id") for kind in self.kinds}
        marks = [getattr(config, f"{name}_token_id") for name in self.marks]
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if missing := set(marks) - set(added.values()):
            raise ValueError(
                f"the model's media tokens {sorted(missing)} are no special tokens of this tokenizer; "
                "use the tokenizer of the model"
            )
        self.forbidden_ids = tuple(sorted({*marks, *(added[name] for name in self.media_tokens if name in added)}))
        names = {index: content for content, index in added.items()}
        self._marks = {kind: names[index] for kind, index in self._pad_ids.items()}
        self._image_token = self._marks["image"]
        self._media_token = re.compile("|".join(re.escape(names[index]) for index in self.forbidden_ids))

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
    ) -> VisionEncoder:
        """The encoder of a checkpoint: a local directory or a hub id. Pixel limits default to the checkpoint's."""
        # Read as JSON: transformers' image processors import torchvision if it is installed, and it does not always
        # load. Newer checkpoints have the settings in processor_config.json.
        saved = read_checkpoint_json(path, "preprocessor_config.json") or read_checkpoint_json(
            path, "processor_config.json"
        )
        saved = saved.get("image_processor", saved)
        if not saved:
            raise ValueError(
                f"{path} has no preprocessor_config.json; copy it from the checkpoint the model was made from"
            )
        try:
            settings = cls.read_image_settings(saved, config, min_pixels, max_pixels)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(tokenizer, config, settings, **options)

    # ------------------------------------------------------------------------------------------- what a family defines
    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        """The image settings from the checkpoint's preprocessor_config.json; the limits are the user's."""
        raise NotImplementedError

    def visible_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of what the model sees of an image at its target size."""
        return height, width

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        """The tokens of a medium at its target size."""
        rows, columns = (side // self.image_settings.factor for side in self.visible_size(height, width))
        return rows * columns

    def pixels(self, array: np.ndarray, device: torch.device | None) -> Tensor:
        """[entries, 3, H, W]: what `pixel_values` holds for an image at its target size."""
        image = to_device(torch.tensor(self.visible_part(array)), device)
        return normalize(image.permute(2, 0, 1), self.image_settings)[None]

    # --------------------------------------------------------------------------------------------------- PromptEncoder
    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the prompt. `sizes` are those of the media as they come, before the resize to `target_size`."""
        ids = self._tokens(task, len(sizes)).tokens.ids
        return len(ids) + sum(
            self.count_tokens(medium, *self._resized(medium, *size)) - 1
            for medium, size in zip(task.media, sizes, strict=True)
        )

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward in addition to the ids, for one prompt: position_ids [L] and, if it has
        images, pixel_values [entries, ..]. `media`: another view of the images, of the same sizes."""
        inputs = {"position_ids": torch.arange(len(prompt.ids))}
        if media := self._check_view(prompt, media):
            inputs["pixel_values"] = torch.cat([self.pixels(array, device) for array in media])
        return inputs

    def visible_part(self, medium: np.ndarray) -> np.ndarray:
        height, width = self.visible_size(*medium.shape[-3:-1])
        top, left = (medium.shape[-3] - height) // 2, (medium.shape[-2] - width) // 2
        return medium[..., top : top + height, left : left + width, :]

    # --------------------------------------------------------------------------------------------------------- helpers
    def _make_prompt(self, task: Task, media: Sequence[np.ndarray], rendered: Rendered) -> Prompt:
        engine_ids = torch.tensor(rendered.tokens.ids, dtype=torch.long)
        engine_pool = self._text_pool(rendered)
        ids: list[Tensor] = []
        pool: list[Tensor] = []
        begin = 0
        pads = self._is_pad(engine_ids).nonzero().flatten().tolist()
        for pad, medium, array in zip(pads, task.media, media, strict=True):
            medium_ids, medium_pool = self._expand(medium, *self._check_array(array))
            ids += [engine_ids[begin:pad], medium_ids]
            pool += [engine_pool[begin:pad], medium_pool]
            begin = pad + 1
        all_ids, all_pools = torch.cat([*ids, engine_ids[begin:]]), torch.cat([*pool, engine_pool[begin:]])
        return Prompt(task, tuple(media), all_ids, engine_ids, all_pools)

    def _tokens(self, task: Task, media_count: int) -> Rendered:
        check_marks(task, media_count)
        for string in iter_strings(task.messages):
            if match := self._media_token.search(string):
                raise ValueError(f"the text contains the media token {match[0]}; images must be image parts")
        if others := {medium.kind for medium in task.media} - self._pad_ids.keys():
            raise ValueError(f"this model takes no {min(others)}s")
        return super()._tokens(task, media_count)

    def _tokenize(
        self, media: Sequence[Medium], messages: Sequence[Mapping[str, Any]], text: str, placeholders: Placeholders
    ) -> Rendered:
        rendered = super()._tokenize(media, messages, text, placeholders)
        for kind, index in self._pad_ids.items():
            pads, count = rendered.tokens.ids.count(index), sum(medium.kind == kind for medium in media)
            if pads != count:  # the template drops images, or joined text became a token
                raise ValueError(f"the rendered prompt has {pads} {self._marks[kind]} for {count} {kind}s")
        kinds = [self._pad_ids[medium.kind] for medium in media]
        if [index for index in rendered.tokens.ids if index in self._pad_ids.values()] != kinds:
            raise ValueError("the chat template puts images and videos in another order than the messages")
        return rendered

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Templates of vision-language models read parts; many drop a content that is a text."""
        return [{**message, "content": list(content_parts(message))} for message in messages]

    def _part_text(self, part: Mapping[str, Any]) -> str:
        return part["text"] if part["type"] == "text" else self._marks[part["type"]]

    def _is_pad(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(list(self._pad_ids.values())))

    def _resized(self, medium: Medium, height: int, width: int) -> tuple[int, int]:
        return self.target_size(height, width)

    def _expand(self, medium: Medium, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Ids and pools of the tokens of a medium at its target size."""
        count = self.count_tokens(medium, height, width)
        return torch.full((count,), self._pad_ids[medium.kind]), torch.full((count,), VISION_POOL)

    def _check_array(self, array: np.ndarray) -> tuple[int, int]:
        """Height and width of a medium."""
        assert array.dtype in (np.uint8, np.float32), f"{array.dtype} is no type of pixels"
        assert array.ndim in (3, 4) and array.shape[-1] == 3, f"{array.shape} is no image, nor a clip"
        return array.shape[-3], array.shape[-2]

    def _check_view(self, prompt: Prompt, media: Sequence[np.ndarray] | None) -> Sequence[np.ndarray]:
        """The media of a prompt, or another view of them."""
        if media is None:
            return prompt.media
        assert [a.shape for a in media] == [a.shape for a in prompt.media], "another view must have the same sizes"
        return media

    def _settings(self) -> list[Any]:
        return [*super()._settings(), *astuple(self.image_settings), *self.forbidden_ids]
