"""Other views of an image (SPEC 1.1): what a token loses under them is how much it depends on the image.

One perturbed view per prompt, shared by all its responses and keyed by (seed, step, task id): scores in a group are
comparable, the view is encoded once, and a resumed run repeats it. All frames of a clip get one mask, or the
neighbours would give away what one frame hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from mtrl.types import Prompt
from mtrl.utils.seeding import rng_for

MID_GREY = 127


@dataclass(frozen=True)
class Perturbation:
    """A kind of `PERTURBATIONS` and its strength."""

    kind: str = "random_patch_blackening"
    patch_size: int = 14  # side of a blackened square, in pixels
    black_prob: float = 0.5
    noise_std: float = 189.0  # on the scale of pixel values, 0 to 255
    blur_radius: float = 6.0  # in pixels
    seed: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PERTURBATIONS:
            raise ValueError(f"no perturbation {self.kind!r}; there are {', '.join(sorted(PERTURBATIONS))}")

    def view(self, prompt: Prompt, step: int) -> tuple[np.ndarray, ...]:
        """The prompt's media perturbed, of the same shapes."""
        random = rng_for("perturb", self.seed, step, prompt.task.id)
        apply = PERTURBATIONS[self.kind]
        return tuple(apply(frames(medium), random, self).reshape(medium.shape) for medium in prompt.media)


Perturb = Callable[[np.ndarray, np.random.Generator, Perturbation], np.ndarray]
PERTURBATIONS: dict[str, Perturb] = {}
"""Kind -> function of (frames [F, H, W, 3] uint8, generator, settings). `PERTURBATIONS["mine"] = f` adds one."""


def register(function: Perturb) -> Perturb:
    PERTURBATIONS[function.__name__] = function
    return function


def frames(medium: np.ndarray) -> np.ndarray:
    """An image as a clip of one frame. Read-only: the prompt keeps its pixels whatever a perturbation does."""
    clip = medium.view() if medium.ndim == 4 else medium[None]
    clip.flags.writeable = False
    return clip


@register
def random_patch_blackening(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    """Squares of a grid turn black; a square at the edge may be cut off."""
    size = settings.patch_size
    count, height, width, channels = clip.shape
    black = random.random((-(-height // size), -(-width // size))) < settings.black_prob
    kept = (~black).astype(np.uint8).repeat(size, 0).repeat(size * channels, 1)[:height, : width * channels]
    return (clip.reshape(count, height, width * channels) * kept).reshape(clip.shape)  # rows: numpy's quick way


@register
def gaussian_noise(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    noise = random.standard_normal(clip.shape[1:], dtype=np.float32) * settings.noise_std
    return np.clip(clip + noise, 0, 255).astype(np.uint8)


@register
def gaussian_blur(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    blur = ImageFilter.GaussianBlur(settings.blur_radius)
    return np.stack([np.asarray(Image.fromarray(frame).filter(blur)) for frame in clip])


@register
def blank(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    return np.full_like(clip, MID_GREY)
