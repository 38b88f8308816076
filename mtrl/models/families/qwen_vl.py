"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

With images the three differ only in what their checkpoints say (patch 14 or 16, pixel limits, mean and std, template),
so one class serves them. Video will part them: Qwen2.5-VL spaces frames in time, Qwen3-VL writes time stamps between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.families.text import TextEncoder, check_marks
from mtrl.models.families.vision import patchify, rotary_positions, target_size
from mtrl.models.families.written_tokens import strings_in
from mtrl.protocols import ImageSettings
from mtrl.types import VISION_POOL, Prompt, Task


class QwenVLEncoder(TextEncoder):
    """A PromptEncoder for Qwen's vision-language families.

    `forbidden_ids`: the image and video pads, the vision start and end marks, and the vision pad. A response with one
    of them would ask a later pass for an image that is not there. <|im_start|> is no media mark: it breaks nothing
    and stays allowed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, **options)
        self.image_settings: ImageSettings = image
        self._image_id: int = config.image_token_id
        marks = [getattr(config, f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end")]
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if missing := set(marks) - set(added.values()):
            raise ValueError(
                f"the model's media tokens {sorted(missing)} are no special tokens of this tokenizer; "
                "do model and tokenizer belong together?"
            )
        self.forbidden_ids = tuple(sorted({*marks, added.get("<|vision_pad|>", marks[0])}))
        names = {index: content for content, index in added.items()}
        self._image_mark = names[marks[2]] + names[marks[0]] + names[marks[3]]
        self._media_token = re.compile("|".join(re.escape(names[index]) for index in self.forbidden_ids))

    # ------------------------------------------------------------------------------------------------ PromptEncoder
    def target_size(self, height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, self.image_settings)

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the prompt. `sizes` are those of the images as they come, before the resize to `target_size`."""
        ids = self._tokens(task, len(sizes))[1].ids
        sides = (self._side_tokens(*self.target_size(*size)) for size in sizes)
        return len(ids) + sum(rows * columns - 1 for rows, columns in sides)

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        sides = [self._side_tokens(*self._checked(array)) for array in media]
        text, tokens = self._tokens(task, len(media))
        engine_ids = torch.tensor(tokens.ids, dtype=torch.long)
        is_pad = engine_ids == self._image_id
        pool = self._text_pool(task, text, tokens)
        pool[is_pad] = VISION_POOL
        repeats = torch.ones_like(engine_ids)
        repeats[is_pad] = torch.tensor([rows * columns for rows, columns in sides], dtype=torch.long)
        ids, pool = engine_ids.repeat_interleave(repeats), pool.repeat_interleave(repeats)
        return Prompt(task, tuple(media), ids, engine_ids, pool)

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """What the model's forward takes besides the ids, for one prompt, without a batch dimension:

        position_ids       [3, L] time, height, width; in a batch [3, B, L]
        mm_token_type_ids  [L] 1 for image tokens, else 0; in a batch [B, L], zeros for response tokens
        pixel_values       [patches of all images, channels * frames * patch * patch] float32; batches concatenate
        image_grid_thw     [images, 3] patches in time, height and width; batches concatenate

        The last two are missing where the prompt has no image. `media`: another view of the images, of the same sizes.
        Pixels are made on the `device`, from bytes.
        """
        if media is None:
            media = prompt.media
        assert [a.shape for a in media] == [a.shape for a in prompt.media], "another view must have the same sizes"
        sides = [self._side_tokens(*self._checked(array)) for array in media]
        is_pad = prompt.ids == self._image_id
        inputs = {"position_ids": rotary_positions(is_pad, sides), "mm_token_type_ids": is_pad.long()}
        if media:
            inputs["pixel_values"] = torch.cat([patchify(array, self.image_settings, device) for array in media])
            merge = self.image_settings.merge_size
            grids = [(1, rows * merge, columns * merge) for rows, columns in sides]
            inputs["image_grid_thw"] = torch.tensor(grids)
        return inputs

    # --------------------------------------------------------------------------------------------------- the pieces
    def _tokens(self, task: Task, media_count: int) -> tuple[str, Encoding]:
        check_marks(task, media_count)
        for string in strings_in(task.messages):
            if found := self._media_token.search(string):
                raise ValueError(f"the text contains the media token {found[0]}; images must stand as image parts")
        text, tokens = super()._tokens(task, media_count)
        pads = tokens.ids.count(self._image_id)
        if pads != media_count:  # a template that drops images, or text that becomes a token once it is joined
            raise ValueError(f"the rendered prompt has {pads} {self._image_mark} for {media_count} images")
        return text, tokens

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]  # these templates read parts themselves

    def _part_text(self, part: Mapping[str, Any]) -> str:
        return part["text"] if part["type"] == "text" else self._image_mark

    def _checked(self, array: np.ndarray) -> tuple[int, int]:
        assert array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3, f"{array.dtype} {array.shape}"
        height, width = array.shape[:2]
        assert height % self.image_settings.factor == 0 == width % self.image_settings.factor, (
            f"{height} x {width} is not a target size"
        )
        return height, width

    def _side_tokens(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tokens of an image at its target size."""
        return height // self.image_settings.factor, width // self.image_settings.factor

    def _settings(self) -> list[Any]:
        return [*super()._settings(), *astuple(self.image_settings), *self.forbidden_ids]
