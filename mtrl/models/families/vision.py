"""How Qwen's vision-language families process an image or a clip: its size, its patches, its positions.

The numbers (patch, merge, limits, mean, std) come from the checkpoint. For images Qwen2-VL, Qwen2.5-VL and Qwen3-VL
follow one rule and differ only in those numbers; for video they differ (`clips.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.models.device_copy import to_device
from mtrl.protocols import ImageSettings

MAX_ASPECT = 200  # as in Hugging Face's image processor

# transformers' defaults for pixel values in a preprocessor_config.json: the mean and deviation of CLIP, or 1/2.
SCALING = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
CLIP_PIXELS = SCALING | {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PLAIN_PIXELS = SCALING | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def read_normalization(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ImageSettings`, from a checkpoint's settings and their defaults."""
    normal = saved["do_normalize"]
    return {
        "rescale_factor": saved["rescale_factor"] if saved["do_rescale"] else 1.0,
        "image_mean": tuple(saved["image_mean"]) if normal else (0.0,) * 3,
        "image_std": tuple(saved["image_std"]) if normal else (1.0,) * 3,
    }


def target_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The nearest multiples of `factor`, scaled into the pixel limits with the same aspect ratio."""
    check_aspect(height, width)
    factor, area = settings.factor, height * width
    near = round(height / factor) * factor, round(width / factor) * factor
    if near[0] * near[1] > settings.max_pixels:
        shrink = math.sqrt(area / settings.max_pixels)
        down = (math.floor(side / shrink / factor) * factor for side in (height, width))
        return max(factor, next(down)), max(factor, next(down))
    if near[0] * near[1] < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / area)
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return near


def check_aspect(height: int, width: int) -> None:
    """Raise a ValueError for an image without area, or one that is too long."""
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels has no area")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"an image of {height} x {width} pixels is longer than {MAX_ASPECT} times its width")


def normalize(values: Tensor, settings: ImageSettings) -> Tensor:
    """Bytes [.., 3, H, W] as float32 pixel values, on their device."""
    normal = settings.image_mean, settings.image_std
    mean, std = (to_device(torch.tensor(value), values.device).view(3, 1, 1) for value in normal)
    return values.float().mul_(settings.rescale_factor).sub_(mean).div_(std)


def patchify(medium: np.ndarray, settings: ImageSettings, device: torch.device | None = None) -> Tensor:
    """[H, W, 3] or [F, H, W, 3] uint8 to [patches, channels * frames * patch * patch] float32.

    Patches that merge into one token are adjacent. A patch spans several frames: an image is repeated, and so is the
    last frame of a clip if the last patch lacks frames. Hugging Face's processors give the same numbers, several times
    slower for a small image.
    """
    height, width = medium.shape[-3:-1]
    p, m = settings.patch_size, settings.merge_size
    # torch.tensor copies: from_numpy warns about read-only arrays, which decoded images often are.
    frames = to_device(torch.tensor(medium), device).view(-1, height, width, 3)
    deep = 1 if medium.ndim == 3 else settings.temporal_patch_size
    if missing := -len(frames) % deep:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    blocks = frames.view(-1, deep, height // (p * m), m, p, width // (p * m), m, p, 3)
    patches = normalize(blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, deep, p * p), settings)
    return patches.expand(-1, -1, settings.temporal_patch_size, -1).reshape(len(patches), -1)


def rotary_positions(
    is_pad: Tensor, sides: Sequence[tuple[int, int]], times: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """[3, L]: the time, height and width position of each prompt token.

    `is_pad` [L] marks image tokens, `sides` are the (rows, columns) of tokens of each image, `times` the time positions
    of its patches (by default one). Text advances in all three axes; an image spreads from the current position over
    rows and columns, and the next text token follows its largest position:

    text text [2 x 3 image] text  ->  time   0 1 | 2 2 2 2 2 2 | 5
                                      height 0 1 | 2 2 2 3 3 3 | 5
                                      width  0 1 | 2 3 4 2 3 4 | 5
    """
    times = [(0,)] * len(sides) if times is None else times
    positions = torch.empty(3, len(is_pad), dtype=torch.long)
    pads = is_pad.nonzero().flatten().tolist()
    sizes = [len(time) * rows * columns for (rows, columns), time in zip(sides, times, strict=True)]
    assert len(pads) == sum(sizes), "image tokens do not match the images"
    token = position = seen = 0
    for (rows, columns), time, size in zip(sides, times, sizes, strict=True):
        start = pads[seen]
        positions[:, token:start] = torch.arange(position, position + start - token)
        position += start - token
        token = start + size
        image = positions[:, start:token].view(3, len(time), rows, columns)
        image[:] = position
        image[0] += torch.tensor(time)[:, None, None]
        image[1] += torch.arange(rows)[:, None]
        image[2] += torch.arange(columns)
        position += max(rows, columns, time[-1] + 1)
        seen += size
    positions[:, token:] = torch.arange(position, position + len(is_pad) - token)
    return positions
