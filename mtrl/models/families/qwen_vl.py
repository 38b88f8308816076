"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

For images the three differ only in the settings of their checkpoints (patch 14 or 16, pixel limits, mean and std,
template), so one class serves them. For video they differ (`clips.py`): Qwen2.5-VL spaces frames in time, Qwen3-VL
writes timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtrl.models.families.clips import ClipRules, frame_settings
from mtrl.models.families.vision import CLIP_PIXELS, patchify, read_normalization, rotary_positions, target_size
from mtrl.models.families.vision_encoder import VisionEncoder
from mtrl.protocols import Clip, ImageSettings, VideoSettings
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Medium, Prompt

# transformers' defaults for keys that a preprocessor_config.json lacks.
IMAGE_DEFAULTS: dict[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    **CLIP_PIXELS,
}


class QwenVLEncoder(VisionEncoder):
    """A PromptEncoder for Qwen's vision-language families. <|im_start|> is no media mark and stays allowed."""

    kinds = ("image", "video")
    marks = ("image", "video", "vision_start", "vision_end")
    media_tokens = ("<|vision_pad|>",)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, image: ImageSettings, **options: Any
    ) -> None:
        super().__init__(tokenizer, config, image, **options)
        self._clips = ClipRules(
            image.temporal_patch_size,
            has_timestamps=config.model_type.startswith("qwen3"),
            positions_per_second=getattr(config.vision_config, "tokens_per_second", None),
        )
        self._begin_id, self._end_id = config.vision_start_token_id, config.vision_end_token_id
        begin, end = (str(tokenizer.convert_ids_to_tokens(each)) for each in (self._begin_id, self._end_id))
        self._marks = {kind: begin + pad + end for kind, pad in self._marks.items()}

    @classmethod
    def read_image_settings(
        cls, saved: Mapping[str, Any], config: PreTrainedConfig, min_pixels: int | None, max_pixels: int | None
    ) -> ImageSettings:
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | (saved.get("size") or {})
        limits = (saved.get("min_pixels") or size["shortest_edge"], saved.get("max_pixels") or size["longest_edge"])
        saved = IMAGE_DEFAULTS | {key: value for key, value in saved.items() if value is not None}
        vision = config.vision_config
        if (saved["patch_size"], saved["merge_size"]) != (vision.patch_size, vision.spatial_merge_size):
            raise ValueError(
                f"the image settings have patch {saved['patch_size']} and merge {saved['merge_size']}, "
                f"config.json {vision.patch_size} and {vision.spatial_merge_size}; they do not belong together"
            )
        return ImageSettings(
            patch_size=saved["patch_size"],
            merge_size=saved["merge_size"],
            temporal_patch_size=saved["temporal_patch_size"],
            min_pixels=limits[0] if min_pixels is None else min_pixels,
            max_pixels=limits[1] if max_pixels is None else max_pixels,
            **read_normalization(saved),
        )

    # ------------------------------------------------------------------------------------------------ PromptEncoder
    def target_size(self, height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, self.image_settings)

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, frame_settings(self.image_settings, self.video_settings))

    def clip(self, total: int, fps: float) -> Clip:
        return self._clips.sample(total, fps, self.video_settings)

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
        media = self._check_view(prompt, media)
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

    def engine_image_arguments(self) -> dict[str, Any]:
        return self.image_settings.processor_arguments()

    # ------------------------------------------------------------------------------------------------------ helpers
    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]  # these templates read parts themselves

    def _resized(self, medium: Medium, height: int, width: int) -> tuple[int, int]:
        return (self.target_size if medium.kind == "image" else self.frame_size)(height, width)

    def count_tokens(self, medium: Medium, height: int, width: int) -> int:
        """Tokens of a medium: those of its frames, with timestamps and marks where a family writes them."""
        rows, columns = self._side_tokens(height, width)
        if medium.kind == "image":
            return rows * columns
        clip = _get_clip(medium)
        if not self._clips.has_timestamps:
            return -(-len(clip.frames) // self._clips.frames_per_patch) * rows * columns
        return sum(len(stamp) + rows * columns + 2 for stamp in self._encode_timestamps(clip))

    def _expand(self, medium: Medium, height: int, width: int) -> tuple[Tensor, Tensor]:
        if medium.kind == "image" or not self._clips.has_timestamps:
            return super()._expand(medium, height, width)
        rows, columns = self._side_tokens(height, width)
        size, pad = rows * columns, self._pad_ids[medium.kind]
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
        height, width = super()._check_array(array)
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
        return [*super()._settings(), *videos]


def _get_clip(medium: Medium) -> Clip:
    assert medium.clip is not None, "the frames of this video were not counted"
    return medium.clip
