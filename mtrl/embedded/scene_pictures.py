"""How a scene looks: objects in a grid of cells, each as large as one vision token."""

from __future__ import annotations

from collections.abc import Sequence
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
GRID = 3  # cells a side
SIDE = GRID * CELL
TINT = 24.0  # of the ground, as light falls in a room: cold above and warm below, reddish left and greenish right
FINE = 8  # how much larger a shape is drawn than shown


class DrawnShape(NamedTuple):
    """One object as the picture wants it."""

    cell: int
    colour: tuple[int, int, int]
    shape: str
    radius: int
    offset: tuple[int, int]


def render(things: Sequence[DrawnShape], noise: np.random.Generator) -> np.ndarray:
    """[84, 84, 3] uint8: shapes with soft edges and slightly varying colours on a light, grainy ground."""
    picture = np.full((SIDE, SIDE, 3), 195 + 30 * noise.random(), dtype=np.float32)
    slope = np.repeat(np.linspace(1, -1, GRID), CELL) * TINT
    picture[..., 2] += slope[:, None]
    picture[..., 0] += slope
    for thing in things:
        top, left = CELL * (thing.cell // GRID), CELL * (thing.cell % GRID)
        cell = picture[top : top + CELL, left : left + CELL]
        colour = np.array(thing.colour) + (noise.random(3) - 0.5) * 24
        cover = np.roll(stencil(thing.shape, thing.radius), thing.offset, axis=(0, 1))
        cell += cover[..., None] * (colour - cell)
    picture += (noise.random(picture.shape) - 0.5) * 12
    return picture.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=64)
def stencil(shape: str, radius: int) -> np.ndarray:
    """[28, 28] float32: how much of each pixel the shape covers."""
    centre, reach = CELL * FINE // 2, radius * FINE
    low, high = centre - reach, centre + reach
    canvas = Image.new("L", (CELL * FINE, CELL * FINE))
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
