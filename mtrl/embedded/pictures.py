"""Pictures of the embedded tasks: coloured shapes in a grid of cells, each as large as one vision token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 45, 45),
    "orange": (240, 145, 30),
    "yellow": (235, 220, 50),
    "green": (50, 160, 60),
    "blue": (45, 85, 215),
    "purple": (140, 60, 175),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
CELL = 28  # pixels
TINT = 24.0  # tint of the ground, like light in a room: cold above, warm below, reddish left, greenish right
OVERSAMPLING = 8  # how much larger a shape is drawn, for soft edges


class DrawnShape(NamedTuple):
    cell: int  # row by row
    colour: str
    shape: str
    radius: int
    offset: tuple[int, int]  # from the centre of the cell, in pixels


def render(
    shapes: Iterable[DrawnShape], noise: np.random.Generator, cells_per_side: int, brightness: tuple[int, int]
) -> np.ndarray:
    """[side, side, 3] uint8: shapes with soft edges and slightly varying colours on a light, grainy ground.
    `brightness`: lowest value of the ground and its range."""
    side, (darkest, spread) = cells_per_side * CELL, brightness
    picture = np.full((side, side, 3), darkest + spread * noise.random(), dtype=np.float32)
    slope = np.repeat(np.linspace(1, -1, cells_per_side), CELL) * TINT
    picture[..., 2] += slope[:, None]
    picture[..., 0] += slope
    for each in shapes:
        top, left = CELL * (each.cell // cells_per_side), CELL * (each.cell % cells_per_side)
        cell = picture[top : top + CELL, left : left + CELL]
        colour = np.array(COLOURS[each.colour]) + (noise.random(3) - 0.5) * 24
        coverage = np.roll(stencil(each.shape, each.radius), each.offset, axis=(0, 1))
        cell += coverage[..., None] * (colour - cell)
    picture += (noise.random(picture.shape) - 0.5) * 12
    return picture.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=64)
def stencil(shape: str, radius: int) -> np.ndarray:
    """[28, 28] float32: the share of each pixel that the shape covers."""
    centre, reach = CELL * OVERSAMPLING // 2, radius * OVERSAMPLING
    low, high = centre - reach, centre + reach
    canvas = Image.new("L", (CELL * OVERSAMPLING, CELL * OVERSAMPLING))
    draw = ImageDraw.Draw(canvas)
    if shape in ("circle", "ring"):
        draw.ellipse((low, low, high, high), fill=255)
        if shape == "ring":
            inner = reach * 11 // 20
            draw.ellipse((centre - inner, centre - inner, centre + inner, centre + inner), fill=0)
    elif shape == "square":
        side = reach * 22 // 25
        draw.rectangle((centre - side, centre - side, centre + side, centre + side), fill=255)
    elif shape == "triangle":
        draw.polygon([(centre, low), (low, high), (high, high)], fill=255)
    elif shape == "diamond":
        draw.polygon([(centre, low), (high, centre), (centre, high), (low, centre)], fill=255)
    else:
        arm = reach * 3 // 10
        draw.rectangle((low, centre - arm, high, centre + arm), fill=255)
        draw.rectangle((centre - arm, low, centre + arm, high), fill=255)
    return np.asarray(canvas.resize((CELL, CELL), Image.Resampling.BOX), dtype=np.float32) / 255
