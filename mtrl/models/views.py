"""Other views of a prompt's images: what a signal or a credit rule compares the original with.

    perturbed       the perturbation of the run, `optimization.perturbation`
    black           every pixel is 0
    pixelated(16)   cells of 16 x 16 pixels have their mean colour
    crop(0.5)       a random part with half of each side, enlarged to the whole image
    crop(box)       the part that the column `box` of the row names: left, top, right, bottom as shares of the sides
    noised(2.0)     normal noise with this standard deviation on normalized pixel values, which are not clipped
    none            no image: nothing attends to its tokens, and all other tokens keep their positions
    counterfactual(2)
                    the original images; in every layer text reads a mean value in place of those of image tokens that
                    it attends to by more than 2 standard deviations above the mean (`counterfactual.py`)

Random views are keyed by (seed, step, task, view), so all responses of a group see the same one, and a resumed run
repeats it. All frames of a clip get the same part and the same noise. A prompt without images has one view.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mtrl.models.perturb import Perturbation, as_clip
from mtrl.protocols import ImageSettings
from mtrl.types import COUNTERFACTUAL, PERTURBED, Prompt
from mtrl.utils.errors import RunError
from mtrl.utils.seeding import rng_for

NAME = re.compile(r"(\w+)(?:\((\w+(?:\.\d+)?)\))?")
NO_IMAGE = "none"


@dataclass(frozen=True)
class View:
    """A kind of view, and its argument: a number, or the name of a column."""

    kind: str
    argument: float | str | None = None

    @classmethod
    def parse(cls, name: str) -> View:
        """The view of a name. Raises ValueError with the views that there are.

        >>> View.parse("noised(2)"), View.parse("crop(box)"), View.parse("none")
        (View(kind='noised', argument=2.0), View(kind='crop', argument='box'), View(kind='none', argument=None))
        """
        found = NAME.fullmatch(name)
        kind, argument = found.groups() if found else ("", None)
        value = float(argument) if argument is not None and argument[0].isdigit() else argument
        if kind not in ARGUMENTS or not ARGUMENTS[kind](value):
            raise ValueError(f"there is no view {name}; there are {', '.join(EXAMPLES)}")
        return cls(kind, value)


EXAMPLES = (
    PERTURBED,
    "black",
    "pixelated(16)",
    "crop(0.5)",
    "crop(box)",
    "noised(2.0)",
    NO_IMAGE,
    f"{COUNTERFACTUAL}(2)",
)
ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    PERTURBED: lambda value: value is None,
    "black": lambda value: value is None,
    "pixelated": lambda value: isinstance(value, float) and value >= 2 and value.is_integer(),
    "crop": lambda value: isinstance(value, str) or (value is not None and 0 < value < 1),
    "noised": lambda value: isinstance(value, float) and value > 0,
    NO_IMAGE: lambda value: value is None,
    COUNTERFACTUAL: lambda value: isinstance(value, float),
}


def standard_deviations(name: str) -> float | None:
    """The argument of a counterfactual view; None for other views."""
    if name.partition("(")[0] != COUNTERFACTUAL:
        return None
    argument = View.parse(name).argument
    assert isinstance(argument, float)
    return argument


@dataclass(frozen=True)
class ImageViews:
    """The media of prompts under any view."""

    perturbation: Perturbation
    settings: ImageSettings | None = None  # of the model, for noise on normalized values

    def media(self, name: str, prompt: Prompt, step: int) -> tuple[np.ndarray, ...] | None:
        """The prompt's media in the same shapes; None for images that nothing sees."""
        view = View.parse(name)
        if view.kind == NO_IMAGE:
            return None if prompt.media else ()
        if view.kind == COUNTERFACTUAL:
            return prompt.media
        if view.kind == PERTURBED:
            return self.perturbation.view(prompt, step)
        if isinstance(view.argument, str):
            box = read_box(prompt, view.argument)
            return tuple(enlarge(as_clip(medium), box).reshape(medium.shape) for medium in prompt.media)
        random = rng_for("view", self.perturbation.seed, step, prompt.task.id, name)
        return tuple(self._draw(view, as_clip(medium), random).reshape(medium.shape) for medium in prompt.media)

    def _draw(self, view: View, clip: np.ndarray, random: np.random.Generator) -> np.ndarray:
        amount = view.argument
        if view.kind == "black":
            return np.zeros_like(clip)
        assert isinstance(amount, float)
        if view.kind == "pixelated":
            return pixelate(clip, int(amount))
        if view.kind == "crop":
            left, top = random.random(2) * (1 - amount)
            return enlarge(clip, (left, top, left + amount, top + amount))
        assert self.settings is not None, "noise needs the settings of the model"
        unit = np.asarray(self.settings.image_std, np.float32) / np.float32(self.settings.rescale_factor)
        noise = random.standard_normal(clip.shape[1:], dtype=np.float32)
        return clip.astype(np.float32) + noise * unit * np.float32(amount)


def pixelate(clip: np.ndarray, cell: int) -> np.ndarray:
    """Square cells of the mean colour; those at the edges are cut off."""
    height, width = clip.shape[1:3]
    small, whole = (-(-width // cell), -(-height // cell)), (width, height)
    padded = np.pad(clip, ((0, 0), (0, -height % cell), (0, -width % cell), (0, 0)), mode="edge")
    pictures = (Image.fromarray(frame).resize(small, Image.Resampling.BOX) for frame in padded)
    large = (small[0] * cell, small[1] * cell)
    return np.stack(
        [np.asarray(each.resize(large, Image.Resampling.NEAREST).crop((0, 0, *whole))) for each in pictures]
    )


def enlarge(clip: np.ndarray, box: tuple[float, float, float, float]) -> np.ndarray:
    """A part of every frame, enlarged to the whole frame; its sides are shares of those of the frame."""
    height, width = clip.shape[1:3]
    part = (box[0] * width, box[1] * height, box[2] * width, box[3] * height)
    pictures = (Image.fromarray(frame) for frame in clip)
    return np.stack([np.asarray(each.resize((width, height), Image.Resampling.BICUBIC, box=part)) for each in pictures])


def read_box(prompt: Prompt, column: str) -> tuple[float, float, float, float]:
    """The part of the image that a column of the row names."""
    value = (prompt.task.columns or {}).get(column)
    try:
        left, top, right, bottom = map(float, value)  # type: ignore[arg-type]
        valid = 0 <= left < right <= 1 and 0 <= top < bottom <= 1
    except (TypeError, ValueError):
        valid = False
    if not valid or len(prompt.media) != 1:
        raise RunError(
            f"{prompt.task.origin}: the view crop({column}) needs one image and a column {column} with left, top, "
            f"right and bottom of a part of it, as shares between 0 and 1; it has {len(prompt.media)} images and "
            f"{value!r}"
        )
    return left, top, right, bottom
