"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

With images the three differ only in what their checkpoints say (patch 14 or 16, pixel limits, mean and std, template),
so one class serves them. Video parts them (`clips.py`): Qwen2.5-VL spaces frames in time, Qwen3-VL writes time stamps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
from mtrl.models.families.written_tokens import strings_in
from mtrl.protocols import Clip, ImageSettings, VideoSettings
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL, Medium, Prompt, Task


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
        self._pad_ids: dict[str, int] = {"image": config.image_token_id, "video": config.video_token_id}
        self._clips = ClipRules(
            image.temporal_patch_size,
            stamped=config.model_type.startswith("qwen3"),
            per_second=getattr(config.vision_config, "tokens_per_second", None),
        )
        marks = [getattr(config, f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end")]
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if missing := set(marks) - set(added.values()):
            raise ValueError(
                f"the model's media tokens {sorted(missing)} are no special tokens of this tokenizer; "
                "do model and tokenizer belong together?"
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
        return self._clips.clip(total, fps, self.video_settings)

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the prompt. `sizes` are those of the media as they come, before the resize to `target_size`."""
        ids = self._tokens(task, len(sizes))[1].ids
        return len(ids) + sum(
            self._length(medium, *self._side_tokens(*self._media_size(medium)(*size))) - 1
            for medium, size in zip(task.media, sizes, strict=True)
        )

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        sides = [self._side_tokens(*self._checked(array)) for array in media]
        text, tokens = self._tokens(task, len(media))
        engine_ids = torch.tensor(tokens.ids, dtype=torch.long)
        engine_pool = self._text_pool(task, text, tokens)
        ids: list[Tensor] = []
        pool: list[Tensor] = []
        begin = 0
        for place, medium, (rows, columns) in zip(self._pads(engine_ids), task.media, sides, strict=True):
            shown, shown_pool = self._shown(medium, rows * columns)
            ids += [engine_ids[begin:place], shown]
            pool += [engine_pool[begin:place], shown_pool]
            begin = place + 1
        whole = torch.cat([*ids, engine_ids[begin:]]), torch.cat([*pool, engine_pool[begin:]])
        return Prompt(task, tuple(media), whole[0], engine_ids, whole[1])

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """What the model's forward takes besides the ids, for one prompt, without a batch dimension:

        position_ids       [3, L] time, height, width; in a batch [3, B, L]
        mm_token_type_ids  [L] 1 for image tokens, 2 for video tokens, else 0; in a batch [B, L], zeros for responses
        pixel_values       [patches of all media, channels * frames * patch * patch] float32; batches concatenate
        image_grid_thw     [media, 3] patches in time, height and width; batches concatenate
        second_per_grid_ts [videos] seconds of a patch, for families that place videos by them

        The last ones are missing where the prompt has no media; images and videos stand in them in the order of the
        prompt (`parity.py` parts them as transformers wants it). `media`: another view of them, of the same sizes.
        Pixels are made on the `device`, from bytes.
        """
        if media is None:
            media = prompt.media
        assert [a.shape for a in media] == [a.shape for a in prompt.media], "another view must have the same sizes"
        sides = [self._side_tokens(*self._checked(array)) for array in media]
        deep = [1 if array.ndim == 3 else -(-len(array) // self._clips.deep) for array in media]
        kinds = (prompt.ids == self._pad_ids["image"]).long() + 2 * (prompt.ids == self._pad_ids["video"])
        inputs = {"position_ids": self._positions(prompt, sides, deep), "mm_token_type_ids": kinds}
        if media:
            inputs["pixel_values"] = torch.cat([patchify(array, self.image_settings, device) for array in media])
            merge = self.image_settings.merge_size
            grids = [(t, rows * merge, columns * merge) for t, (rows, columns) in zip(deep, sides, strict=True)]
            inputs["image_grid_thw"] = torch.tensor(grids)
        seconds = [self._clips.seconds(medium.clip) for medium in prompt.task.media if medium.clip is not None]
        if seconds and self._clips.timed:
            inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs

    # --------------------------------------------------------------------------------------------------- the pieces
    def _tokens(self, task: Task, media_count: int) -> tuple[str, Encoding]:
        check_marks(task, media_count)
        for string in strings_in(task.messages):
            if found := self._media_token.search(string):
                raise ValueError(f"the text contains the media token {found[0]}; images must stand as image parts")
        text, tokens = super()._tokens(task, media_count)
        for kind, index in self._pad_ids.items():
            pads, count = tokens.ids.count(index), sum(medium.kind == kind for medium in task.media)
            if pads != count:  # a template that drops images, or text that becomes a token once it is joined
                raise ValueError(f"the rendered prompt has {pads} {self._marks[kind]} for {count} {kind}s")
        kinds = [self._pad_ids[medium.kind] for medium in task.media]
        if [index for index in tokens.ids if index in self._pad_ids.values()] != kinds:
            raise ValueError("the chat template puts images and videos in another order than the messages")
        return text, tokens

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]  # these templates read parts themselves

    def _part_text(self, part: Mapping[str, Any]) -> str:
        return part["text"] if part["type"] == "text" else self._marks[part["type"]]

    def _pads(self, ids: Tensor) -> list[int]:
        """Where media stand, in their order."""
        return torch.isin(ids, torch.tensor(list(self._pad_ids.values()))).nonzero().flatten().tolist()

    def _media_size(self, medium: Medium) -> Callable[[int, int], tuple[int, int]]:
        return self.target_size if medium.kind == "image" else self.frame_size

    def _length(self, medium: Medium, rows: int, columns: int) -> int:
        """Tokens that stand for a medium of so many of them in a frame."""
        if medium.kind == "image":
            return rows * columns
        clip = _known(medium)
        if not self._clips.stamped:
            return -(-len(clip.frames) // self._clips.deep) * rows * columns
        return sum(len(stamp) + rows * columns + 2 for stamp in self._stamps(clip))

    def _shown(self, medium: Medium, size: int) -> tuple[Tensor, Tensor]:
        """Ids and pools of the tokens that stand for a medium, `size` of them in a frame."""
        pad = self._pad_ids[medium.kind]
        if medium.kind == "image" or not self._clips.stamped:
            count = self._length(medium, size, 1)
            return torch.full((count,), pad), torch.full((count,), VISION_POOL)
        ids: list[int] = []
        pool: list[int] = []
        mark = TEXT_POOL if self._pool_special else NO_POOL
        for stamp in self._stamps(_known(medium)):
            ids += [*stamp, self._begin_id, *size * [pad], self._end_id]
            pool += [*len(stamp) * [TEXT_POOL], mark, *size * [VISION_POOL], mark]
        return torch.tensor(ids), torch.tensor(pool)

    def _stamps(self, clip: Clip) -> list[list[int]]:
        """The tokens of the times in a clip. They stand between special tokens, so that nothing runs into them."""
        return [self._backend.encode(stamp, add_special_tokens=False).ids for stamp in self._clips.stamps(clip)]

    def _positions(self, prompt: Prompt, sides: Sequence[tuple[int, int]], deep: Sequence[int]) -> Tensor:
        is_pad = torch.isin(prompt.ids, torch.tensor(list(self._pad_ids.values())))
        blocks: list[tuple[tuple[int, int], Sequence[int]]] = []
        for medium, side, patches in zip(prompt.task.media, sides, deep, strict=True):
            if medium.kind == "image":
                blocks.append((side, (0,)))
            elif self._clips.stamped:  # each patch is a picture after its time
                blocks += patches * [(side, (0,))]
            else:
                blocks.append((side, self._clips.times(_known(medium), patches)))
        return rotary_positions(is_pad, [side for side, _ in blocks], [times for _, times in blocks])

    def _checked(self, array: np.ndarray) -> tuple[int, int]:
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
        video = self.video_settings  # what is usual is left out: caches that users have stay good
        videos = () if video == VideoSettings() else ("video", *astuple(video))
        return [*super()._settings(), *astuple(self.image_settings), *self.forbidden_ids, *videos]


def _known(medium: Medium) -> Clip:
    assert medium.clip is not None, "a video whose frames nobody has counted"
    return medium.clip
