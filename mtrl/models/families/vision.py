"""What Qwen's vision-language families do with an image: its size, its patches, its place among the tokens.

Plain functions; the numbers (patch, merge, limits, mean, std) come from the checkpoint. For images Qwen2-VL, Qwen2.5-VL
and Qwen3-VL follow one rule and differ only in those numbers; they part ways at video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtrl.models.transfer import to_device
from mtrl.protocols import ImageSettings

MAX_ASPECT = 200  # longer strips are refused, as Hugging Face's image processor does


def target_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The nearest multiples of `factor`; outside the pixel limits, scaled into them with the aspect ratio kept."""
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels has no area")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"an image of {height} x {width} pixels is longer than {MAX_ASPECT} times its width")
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


def patchify(image: np.ndarray, settings: ImageSettings, device: torch.device | None = None) -> Tensor:
    """[H, W, 3] uint8 to [patches, channels * frames * patch * patch] float32.

    Patches that merge into one token stand next to each other. Hugging Face's processor gives the same numbers but
    takes several times as long for a small image.
    """
    height, width, _ = image.shape
    p, m = settings.patch_size, settings.merge_size
    # torch.tensor copies: decoded images are often read-only, which from_numpy warns about
    blocks = to_device(torch.tensor(image), device).view(height // (p * m), m, p, width // (p * m), m, p, 3)
    patches = blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, p * p).float()
    normal = settings.image_mean, settings.image_std
    mean, std = (to_device(torch.tensor(value), device).view(3, 1, 1) for value in normal)
    patches = patches.mul_(settings.rescale_factor).sub_(mean).div_(std)
    return patches.expand(-1, -1, settings.temporal_patch_size, -1).reshape(len(patches), -1)


def rotary_positions(is_pad: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """[3, L]: the time, height and width position of each prompt token.

    `is_pad` [L] marks image tokens, `sides` are the (rows, columns) of tokens of each image. Text counts on in all
    three; an image spreads from the current position over rows and columns and moves it on by its longer side:

    text text [2 x 3 image] text  ->  time   0 1 | 2 2 2 2 2 2 | 5
                                      height 0 1 | 2 2 2 3 3 3 | 5
                                      width  0 1 | 2 3 4 2 3 4 | 5
    """
    positions = torch.empty(3, len(is_pad), dtype=torch.long)
    pads = is_pad.nonzero().flatten().tolist()
    assert len(pads) == sum(rows * columns for rows, columns in sides), "image tokens do not match the images"
    token = position = seen = 0
    for rows, columns in sides:
        start = pads[seen]
        positions[:, token:start] = torch.arange(position, position + start - token)
        position += start - token
        token = start + rows * columns
        image = positions[:, start:token].view(3, rows, columns)
        image[:] = position
        image[1] += torch.arange(rows)[:, None]
        image[2] += torch.arange(columns)
        position += max(rows, columns)
        seen += rows * columns
    positions[:, token:] = torch.arange(position, position + len(is_pad) - token)
    return positions
