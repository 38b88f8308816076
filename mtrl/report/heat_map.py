"""Attention over an image as a picture: the image, then one panel for each layer segment, drawn with Pillow alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

PANEL, GAP, LINE = 224, 10, 20  # pixels: width of a panel, space around it, a line of text
HEAT = np.array([220.0, 30.0, 0.0])  # where most of the attention goes
PALE = 0.55  # how far the picture under the heat is bleached to grey


@dataclass(frozen=True, eq=False)
class ImageAttention:
    """One image [H, W, 3] and, for each segment by name, the attention [rows, columns] on its tokens."""

    image: np.ndarray
    maps: Mapping[str, Tensor]


def draw_heat_maps(path: Path, title: str, images: list[ImageAttention], notes: Mapping[str, str]) -> None:
    """A row an image; `notes` stand under the name of each segment. In each panel the strongest token is the reddest:
    colours compare within a panel, and its note says what all of it is worth."""
    names = ["image", *notes]
    panels = [[_picture(each.image), *(_heated(each.image, each.maps[name]) for name in notes)] for each in images]
    heights = [row[0].height for row in panels]
    head = 4 * LINE
    size = (GAP + len(names) * (PANEL + GAP), head + sum(heights) + GAP * len(heights))
    canvas = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    draw.text((GAP, GAP), title, fill="black", font=ImageFont.load_default(15))
    for column, name in enumerate(names):
        lines = f"{name}\n{notes.get(name, '')}"
        draw.multiline_text((GAP + column * (PANEL + GAP), 2 * LINE), lines, fill="black", font=font)
    top = head
    for row, height in zip(panels, heights, strict=True):
        for column, panel in enumerate(row):
            canvas.paste(panel, (GAP + column * (PANEL + GAP), top))
        top += height + GAP
    canvas.save(path)


def heat(image: np.ndarray, attention: Tensor) -> np.ndarray:
    """[H, W, 3] uint8: the image bleached, and on each token's square as much red as it has of the strongest's."""
    rows, columns = attention.shape
    strength = (attention / attention.max().clamp(min=1e-12)).numpy()
    tall, wide = image.shape[0] // rows, image.shape[1] // columns
    alpha = strength.repeat(tall, axis=0).repeat(wide, axis=1)[..., None] * 0.85
    grey = image.mean(2, keepdims=True) * (1 - PALE) + 255 * PALE
    return (grey * (1 - alpha) + HEAT * alpha).astype(np.uint8)


def _heated(image: np.ndarray, attention: Tensor) -> Image.Image:
    return _picture(heat(image, attention))


def _picture(image: np.ndarray) -> Image.Image:
    height = max(1, round(image.shape[0] * PANEL / image.shape[1]))
    enlarged = image.shape[1] < PANEL
    return Image.fromarray(image).resize(
        (PANEL, height), Image.Resampling.NEAREST if enlarged else Image.Resampling.BOX
    )
