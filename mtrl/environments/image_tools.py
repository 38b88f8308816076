"""Tools for looking closer: zoom, rotate, mark, and a calculator. Boxes are in the model's own coordinates:

    mtrl.environments.image_tools:ImageTools       pixels of the image as the model sees it (Qwen2.5-VL)
    mtrl.environments.image_tools:ImageTools1000   0 to 1000 in both directions (Qwen3-VL)

The rows have `images`, and `image_sizes` ([width, height] each, as the model sees them) if the model sees them smaller:
then a zoom shows details that the model had not. Imports Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image, ImageDraw

from mtrl.environments.calculator import calculate

MAX_SIDE = 1024  # pixels of an image that a tool shows
MIN_SIDE = 28  # the same: a patch of Qwen's encoders
MIN_REGION = 4  # pixels of a region, in the original
MAX_RATIO = 20.0  # of the sides of a region


@dataclass(frozen=True)
class Shown:
    """An image, and the size in which the model sees it."""

    picture: Image.Image
    width: int
    height: int


class ImageTools:
    """The pictures of a row, and those that the tools make of them, counted from 1."""

    scale: ClassVar[float | None] = None  # of the coordinates; None: pixels

    def reset(self, images: Sequence[Any] = (), image_sizes: Sequence[Sequence[int]] | None = None, **row: Any) -> None:
        pictures = [image.convert("RGB") for image in images or ()]
        sizes = [picture.size for picture in pictures] if image_sizes is None else image_sizes
        self._shown = [Shown(picture, *size) for picture, size in zip(pictures, sizes, strict=True)]

    def zoom(self, box: list[float], image: int = 1) -> list:
        """Shows a region of an image enlarged.

        Args:
            box: Left, top, right and bottom edge of the region, in pixels of the image.
            image: Number of the image, counted from 1.
        """
        return self._zoom(box, image)

    def mark(self, box: list[float], image: int = 1) -> list:
        """Shows an image with a red frame around a region.

        Args:
            box: Left, top, right and bottom edge of the region, in pixels of the image.
            image: Number of the image, counted from 1.
        """
        return self._mark(box, image)

    def rotate(self, degrees: float, image: int = 1) -> list:
        """Shows an image turned clockwise.

        Args:
            degrees: The angle; 90 turns the left side to the top.
            image: Number of the image, counted from 1.
        """
        if not math.isfinite(degrees) or abs(degrees) > 360:
            raise ValueError("degrees must be from -360 to 360")
        source = self._get(image)
        turned = source.picture.rotate(-degrees, resample=Image.Resampling.BICUBIC, expand=True, fillcolor="white")
        return self._add(turned, f"image {image} turned by {degrees:g} degrees", max(source.width, source.height))

    def calculator(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % **, brackets, pi, e, and abs, min, max, round, floor, ceil, sqrt, exp, log, sin, cos, tan.
        """  # noqa: E501  transformers, too, reads a description of one line best
        value = calculate(expression)
        return f"{value:.12g}" if isinstance(value, float) else str(value)

    def _zoom(self, box: Sequence[float], image: int) -> list[dict[str, Any]]:
        source = self._get(image)
        left, top, right, bottom = self._pixels(box, image)
        if min(right - left, bottom - top) < MIN_REGION:
            raise ValueError(f"the region is only {right - left} x {bottom - top} pixels large: choose a larger box")
        if max(right - left, bottom - top) > MAX_RATIO * min(right - left, bottom - top):
            raise ValueError(f"the region is too narrow: no side may be over {MAX_RATIO:g} times as long as the other")
        region = source.picture.crop((left, top, right, bottom))
        return self._add(region, f"the region {list(box)} of image {image}", max(source.width, source.height))

    def _mark(self, box: Sequence[float], image: int) -> list[dict[str, Any]]:
        source = self._get(image)
        edges = self._pixels(box, image)
        marked = source.picture.copy()
        ImageDraw.Draw(marked).rectangle(edges, outline="red", width=max(2, round(max(marked.size) / 200)))
        return self._add(marked, f"image {image} with the region {list(box)}", max(source.width, source.height))

    def _get(self, image: int) -> Shown:
        if not isinstance(image, int) or not 1 <= image <= len(self._shown):
            raise ValueError(f"there is no image {image!r}; they are counted from 1 to {len(self._shown)}")
        return self._shown[image - 1]

    def _pixels(self, box: Sequence[float], image: int) -> tuple[int, int, int, int]:
        """The box in pixels of the original; an error says how to write it."""
        shown = self._get(image)
        width, height = (self.scale, self.scale) if self.scale else (shown.width, shown.height)
        form = f"[left, top, right, bottom], from 0 to {width:g} across and from 0 to {height:g} down"
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(x, (int, float)) for x in box):
            raise ValueError(f"the box must be four numbers: {form}")
        left, top, right, bottom = box
        if not (left < right and top < bottom):
            edges = (
                "left edge must be smaller than the right"
                if not left < right
                else "top must be smaller than the bottom"
            )
            raise ValueError(f"the box {box} is swapped or empty: its {edges}; write {form}")
        if left < 0 or top < 0 or right > width or bottom > height:
            raise ValueError(f"the box {box} reaches beyond image {image}: write {form}")
        across, down = shown.picture.width / width, shown.picture.height / height
        return math.floor(left * across), math.floor(top * down), math.ceil(right * across), math.ceil(bottom * down)

    def _add(self, picture: Image.Image, text: str, side: int) -> list[dict[str, Any]]:
        """Show a picture as large as its source was, and remember it in full."""
        factor = min(side, MAX_SIDE) / max(picture.size)
        width, height = (max(MIN_SIDE, round(length * factor)) for length in picture.size)
        visible = picture.resize((width, height), Image.Resampling.BICUBIC)
        self._shown.append(Shown(picture, width, height))
        number = len(self._shown)
        return [{"type": "text", "text": f"Image {number}, {text}:"}, {"type": "image", "image": visible}]


class ImageTools1000(ImageTools):
    """The same with boxes from 0 to 1000."""

    scale = 1000.0

    def zoom(self, box: list[float], image: int = 1) -> list:
        """Shows a region of an image enlarged.

        Args:
            box: Left, top, right and bottom edge of the region, each from 0 to 1000.
            image: Number of the image, counted from 1.
        """
        return self._zoom(box, image)

    def mark(self, box: list[float], image: int = 1) -> list:
        """Shows an image with a red frame around a region.

        Args:
            box: Left, top, right and bottom edge of the region, each from 0 to 1000.
            image: Number of the image, counted from 1.
        """
        return self._mark(box, image)
