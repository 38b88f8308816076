"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

For images the three differ only in the settings of their checkpoints (patch 14 or 16, pixel limits, mean and std,
template), so one class serves them. For video they differ (`clips.py`): Qwen2.5-VL spaces frames in time, Qwen3-VL
writes timestamps.
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

from mtrl.models.families.clips import ClipRules, frame_settings
from mtrl.models.families.text import TextEncoder, check_marks
from mtrl.models.families.vision import patchify, rotary_positions, target_size
from mtrl.models.families.written_tokens import iter_strings
from mtrl.protocols import Clip, ImageSettings, VideoSettings
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Medium, Prompt, Task


class QwenVLEncoder(TextEncoder):
    """A PromptEncoder for Qwen's vision-language families.

    `forbidden_ids`: the image and video pads, the vision start and end marks, and the vision pad. A response with one
    of them would ask a later pass for an image that does not exist. <|im_start|> is no media mark and stays allowed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, **options)
        self.image_settings: ImageSettings = image
        self._pad_ids: dict[str, int] = {"image": config.image_token_id, "video": config.video_token_id}
        self._clips = ClipRules(
            image.temporal_patch_size,
            has_timestamps=config.model_type.startswith("qwen3"),
            positions_per_second=getattr(config.vision_config, "tokens_per_second", None),
        )
        marks = [getattr(config, f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end")]
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if missing := set(marks) - set(added.values()):
            raise ValueError(
                f"the model's media tokens {sorted(missing)} are no special tokens of this tokenizer; "
                "use the tokenizer of the model"
            )
        self.forbidden_ids = tuple(sorted({*marks, added.get("<|vision_pad|>", marks[0])}))
        names = {index: content for content, index in added.items()}
        self._begin_id, self._end_id = marks[2:]
        self._marks = {kind: names[marks[2]] + names[index] + names[marks[3]] for kind, index in self._pad_ids.items()}
        self._media_token = re.compile("|".join(re.escape(names[index]) for index in self.forbidden_ids))

    # ------------------------------------------------------------------------------------------------ PromptEncoder
    def target_size(self, height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, self.image_settings)

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, frame_settings(self.image_settings, self.video_settings))

    def clip(self, total: int, fps: float) -> Clip:
        return self._clips.sample(total, fps, self.video_settings)

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the prompt. `sizes` are those of the media as they come, before the resize to `target_size`."""
        ids = self._tokens(task, len(sizes))[1].ids
        return len(ids) + sum(
            self._count_tokens(medium, *self._side_tokens(*self._resized(medium, *size))) - 1
            for medium, size in zip(task.media, sizes, strict=True)
        )

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        sides = [self._side_tokens(*self._check_array(array)) for array in media]
        text, tokens = self._tokens(task, len(media))
        engine_ids = torch.tensor(tokens.ids, dtype=torch.long)
        engine_pool = self._text_pool(task, text, tokens)
        ids: list[Tensor] = []
        pool: list[Tensor] = []
        begin = 0
        pads = self._is_pad(engine_ids).nonzero().flatten().tolist()
        for pad, medium, (rows, columns) in zip(pads, task.media, sides, strict=True):
            medium_ids, medium_pool = self._expand(medium, rows * columns)
            ids += [engine_ids[begin:pad], medium_ids]
            pool += [engine_pool[begin:pad], medium_pool]
            begin = pad + 1
        all_ids, all_pools = torch.cat([*ids, engine_ids[begin:]]), torch.cat([*pool, engine_pool[begin:]])
        return Prompt(task, tuple(media), all_ids, engine_ids, all_pools)

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward in addition to the ids, for one prompt, without a batch dimension:

        position_ids       [3, L] time, height, width; in a batch [3, B, L]
        mm_token_type_ids  [L] 1 for image tokens, 2 for video tokens, else 0; in a batch [B, L], zeros for responses
        pixel_values       [patches of all media, channels * frames * patch * patch] float32; batches concatenate
        image_grid_thw     [media, 3] patches in time, height and width; batches concatenate
        second_per_grid_ts [videos] seconds per patch, for families that place videos by them

        The last three are missing if the prompt has no media; they hold images and videos in the order of the prompt
        (`parity.py` separates them for transformers). `media`: another view of them, of the same sizes. Pixel values
        are computed on the `device`, from bytes.
        """
        if media is None:
            media = prompt.media
        assert [a.shape for a in media] == [a.shape for a in prompt.media], "another view must have the same sizes"
        sides = [self._side_tokens(*self._check_array(array)) for array in media]
        depths = [1 if array.ndim == 3 else -(-len(array) // self._clips.frames_per_patch) for array in media]
        kinds = (prompt.ids == self._pad_ids["image"]).long() + 2 * (prompt.ids == self._pad_ids["video"])
        inputs = {"position_ids": self._positions(prompt, sides, depths), "mm_token_type_ids": kinds}
        if media:
            inputs["pixel_values"] = torch.cat([patchify(array, self.image_settings, device) for array in media])
            merge = self.image_settings.merge_size
            grids = [(t, rows * merge, columns * merge) for t, (rows, columns) in zip(depths, sides, strict=True)]
            inputs["image_grid_thw"] = torch.tensor(grids)
        clips = [medium.clip for medium in prompt.task.media if medium.clip is not None]
        if clips and self._clips.uses_seconds:
            inputs["second_per_grid_ts"] = torch.tensor([self._clips.seconds_per_patch(clip) for clip in clips])
        return inputs

    # ------------------------------------------------------------------------------------------------------ helpers
    def _tokens(self, task: Task, media_count: int) -> tuple[str, Encoding]:
        check_marks(task, media_count)
        for string in iter_strings(task.messages):
            if match := self._media_token.search(string):
                raise ValueError(f"the text contains the media token {match[0]}; images must be image parts")
        text, tokens = super()._tokens(task, media_count)
        for kind, index in self._pad_ids.items():
            pads, count = tokens.ids.count(index), sum(medium.kind == kind for medium in task.media)
            if pads != count:  # the template drops images, or joined text became a token
                raise ValueError(f"the rendered prompt has {pads} {self._marks[kind]} for {count} {kind}s")
        kinds = [self._pad_ids[medium.kind] for medium in task.media]
        if [index for index in tokens.ids if index in self._pad_ids.values()] != kinds:
            raise ValueError("the chat template puts images and videos in another order than the messages")
        return text, tokens

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]  # these templates read parts themselves

    def _part_text(self, part: Mapping[str, Any]) -> str:
        return part["text"] if part["type"] == "text" else self._marks[part["type"]]

    def _is_pad(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(list(self._pad_ids.values())))

    def _resized(self, medium: Medium, height: int, width: int) -> tuple[int, int]:
        return (self.target_size if medium.kind == "image" else self.frame_size)(height, width)

    def _count_tokens(self, medium: Medium, rows: int, columns: int) -> int:
        """Tokens of a medium whose frames have so many rows and columns of them."""
        if medium.kind == "image":
            return rows * columns
        clip = _get_clip(medium)
        if not self._clips.has_timestamps:
            return -(-len(clip.frames) // self._clips.frames_per_patch) * rows * columns
        return sum(len(stamp) + rows * columns + 2 for stamp in self._encode_timestamps(clip))

    def _expand(self, medium: Medium, size: int) -> tuple[Tensor, Tensor]:
        """Ids and pools of the tokens of a medium with `size` tokens per frame."""
        pad = self._pad_ids[medium.kind]
        if medium.kind == "image" or not self._clips.has_timestamps:
            count = self._count_tokens(medium, size, 1)
            return torch.full((count,), pad), torch.full((count,), VISION_POOL)
        ids: list[int] = []
        pool: list[int] = []
        mark = TEXT_POOL if self._pool_special else NO_POOL
        for stamp in self._encode_timestamps(_get_clip(medium)):
            ids += [*stamp, self._begin_id, *size * [pad], self._end_id]
            pool += [*len(stamp) * [TEXT_POOL], mark, *size * [VISION_POOL], mark]
        return torch.tensor(ids), torch.tensor(pool)

    def _encode_timestamps(self, clip: Clip) -> list[list[int]]:
        """The tokens of each timestamp. Special tokens surround it, so it merges with no other text."""
        return [self._backend.encode(stamp, add_special_tokens=False).ids for stamp in self._clips.timestamps(clip)]

    def _positions(self, prompt: Prompt, sides: Sequence[tuple[int, int]], depths: Sequence[int]) -> Tensor:
        blocks: list[tuple[tuple[int, int], Sequence[int]]] = []
        for medium, side, patches in zip(prompt.task.media, sides, depths, strict=True):
            if medium.kind == "image":
                blocks.append((side, (0,)))
            elif self._clips.has_timestamps:  # each patch is an image after its timestamp
                blocks += patches * [(side, (0,))]
            else:
                blocks.append((side, self._clips.time_positions(_get_clip(medium), patches)))
        return rotary_positions(self._is_pad(prompt.ids), [side for side, _ in blocks], [times for _, times in blocks])

    def _check_array(self, array: np.ndarray) -> tuple[int, int]:
        assert array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[-1] == 3, f"{array.dtype} {array.shape}"
        height, width = array.shape[-3:-1]
        assert height % self.image_settings.factor == 0 == width % self.image_settings.factor, (
            f"{height} x {width} is not a target size"
        )
        return height, width

    def _side_tokens(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tokens of an image at its target size."""
        return height // self.image_settings.factor, width // self.image_settings.factor

    def _settings(self) -> list[Any]:
        video = self.video_settings  # defaults are left out, so existing caches stay valid
        videos = () if video == VideoSettings() else ("video", *astuple(video))
        return [*super()._settings(), *astuple(self.image_settings), *self.forbidden_ids, *videos]


def _get_clip(medium: Medium) -> Clip:
    assert medium.clip is not None, "the frames of this video were not counted"
    return medium.clip
