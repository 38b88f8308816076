"""Attention over an image as a picture: the image and one panel per layer segment, all on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mtrl.report import style
from mtrl.report.style import QUIET, TICK, text_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

PANEL, GAP, TALLEST, SCALE = 2.2, 0.25, 3.3, 1.0  # inches: a panel and its gap, the gap, panel height, colour scale
HEAD, NOTES = 0.5, 0.5  # inches for the title, and for the two lines above each panel of the first row
HEAT, HOTTEST = "YlOrRd", 0.85  # pale yellow to red, steadily darker so that it also reads in grey; omits black-red
STRONGEST = 0.62  # opacity at the highest attention: the image must show through
BLEACHED = -160.0  # the value that black maps to, with white at 255: heat must show on dark images too
COLOUR_LEFT = 0.5  # share of its colour that the image keeps under the heat
GRID_UP_TO = 16  # tokens per side up to which grid lines are drawn


@dataclass(frozen=True, eq=False)
class ImageAttention:
    """An image [H, W, 3] and, for each segment by name, the attention [rows, columns] on its tokens."""

    image: np.ndarray
    maps: Mapping[str, Tensor]


def draw_heat_maps(path: Path, title: str, images: Sequence[ImageAttention], notes: Mapping[str, str]) -> None:
    style.save_figure(heat_maps(title, images, notes), path)


def heat_maps(title: str, images: Sequence[ImageAttention], notes: Mapping[str, str]) -> Figure:
    """One row per image; `notes` are written under the names of the segments. All panels share one scale, so that
    colours compare between tokens, segments and images."""
    heights = [min((PANEL - GAP) * each.image.shape[0] / each.image.shape[1], TALLEST) for each in images]
    columns = 1 + len(notes)
    figure = style.new_figure(columns * PANEL + SCALE, sum(heights) + HEAD + NOTES + GAP * len(images), HEAD)
    wide, high = figure.get_size_inches()
    figure.text(
        0.14 / wide,
        1 - 0.14 / high,
        style.to_drawable(title, int(8 * wide)),
        va="top",
        **text_style(style.TITLE, weight="bold"),
    )
    ratios = {"height_ratios": heights, "width_ratios": [*[1] * columns, 0.08]}
    grid = figure.add_gridspec(len(images), columns + 1, **ratios)
    strongest = max((float(each.maps[name].max()) for each in images for name in notes), default=0.0) or 1.0
    drawn: Any = None
    for row, each in enumerate(images):
        show(figure.add_subplot(grid[row, 0]), each.image, "image" if row == 0 else "", "")
        for column, (name, note) in enumerate(notes.items(), 1):
            axes = figure.add_subplot(grid[row, column])
            show(axes, bleach(each.image), name if row == 0 else "", note if row == 0 else "")
            drawn = lay_heat(axes, each.image.shape[:2], each.maps[name], strongest)
    if drawn is not None:
        draw_scale(figure.add_subplot(grid[:, -1]), drawn, strongest)
    return figure


def show(axes: Axes, image: np.ndarray, name: str, note: str) -> None:
    axes.imshow(image)
    axes.set_axis_off()
    axes.set_title(note, loc="left", pad=5, **text_style(TICK, QUIET))
    if name:
        offset: dict[str, Any] = {"xytext": (0, 20), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(name, (0, 1), xycoords="axes fraction", va="bottom", **offset, **text_style(TICK + 1))


def bleach(image: np.ndarray) -> np.ndarray:
    """The image lighter and paler, [H, W, 3] uint8: heat must be visible on it, and areas of equal brightness must stay
    distinguishable."""
    grey = image.astype(float) @ np.array([0.299, 0.587, 0.114])  # brightness, as in ITU-R BT.601
    faint = grey[..., None] + COLOUR_LEFT * (image - grey[..., None])
    light = (faint - BLEACHED) / (255 - BLEACHED) * 255
    return light.round().clip(0, 255).astype(np.uint8)


def lay_heat(axes: Axes, size: tuple[int, int], attention: Tensor, strongest: float) -> Any:
    """Draw the attention of each token over its cell."""
    (tall, wide), (rows, columns) = size, attention.shape
    edges = (-0.5, wide - 0.5, tall - 0.5, -0.5)
    look: dict[str, Any] = {"cmap": heat_colours(), "vmin": 0.0, "vmax": strongest, "interpolation": "nearest"}
    drawn = axes.imshow(attention.double().numpy(), extent=edges, **look)
    if max(rows, columns) <= GRID_UP_TO:
        axes.vlines(np.linspace(edges[0], edges[1], columns + 1)[1:-1], *axes.get_ylim(), color="white", linewidth=0.6)
        axes.hlines(np.linspace(edges[3], edges[2], rows + 1)[1:-1], *axes.get_xlim(), color="white", linewidth=0.6)
    return drawn


def heat_colours() -> ListedColormap:
    """The colour map, from transparent to strong but still translucent."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours = colormaps[HEAT](np.linspace(0, HOTTEST, 256))
    colours[:, 3] = STRONGEST * np.linspace(0, 1, 256) ** 0.5
    return ListedColormap(colours)


def draw_scale(axes: Axes, drawn: Any, strongest: float) -> None:
    """Draw the colour bar with round percentages."""
    bar = drawn.figure.colorbar(drawn, cax=axes)
    inside = style.ticks_within(0, 100 * strongest, count=5)
    bar.set_ticks([x / 100 for x in inside], labels=[f"{text}%" for text in style.plain_numbers(inside)])
    bar.ax.tick_params(labelsize=TICK, labelcolor=QUIET, length=0)
    bar.set_label("share of the attention", **text_style(TICK, QUIET))
    bar.outline.set_visible(False)
