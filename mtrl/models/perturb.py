"""Perturbed views of an image (SPEC 1.1): the log-prob that a token loses under them measures its visual dependency.

One perturbed view per prompt, shared by all its responses and keyed by (seed, step, task id): scores in a group are
comparable, the view is encoded once, and a resumed run repeats it. All frames of a clip get the same mask: otherwise
other frames would show what one frame hides.
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
    """An entry of `PERTURBATIONS` and its strength."""

    perturbation: str = "random_patch_blackening"
    patch_size: int = 14  # side of a blackened square, in pixels
    black_prob: float = 0.5
    noise_std: float = 189.0  # on the scale of pixel values, 0 to 255
    blur_radius: float = 6.0  # in pixels
    seed: int = 1

    def __post_init__(self) -> None:
        if self.perturbation not in PERTURBATIONS:
            raise ValueError(f"no perturbation {self.perturbation!r}; there are {', '.join(sorted(PERTURBATIONS))}")

    def view(self, prompt: Prompt, step: int) -> tuple[np.ndarray, ...]:
        """The prompt's perturbed media, in the same shapes."""
        random = rng_for("perturb", self.seed, step, prompt.task.id)
        apply = PERTURBATIONS[self.perturbation]
        return tuple(apply(as_clip(medium), random, self).reshape(medium.shape) for medium in prompt.media)


def as_clip(medium: np.ndarray) -> np.ndarray:
    """An image as a clip of one frame. Read-only, so a perturbation cannot change the prompt's pixels."""
    clip = medium.view() if medium.ndim == 4 else medium[None]
    clip.flags.writeable = False
    return clip


def random_patch_blackening(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    """Blacken random squares of a grid; squares at the edge may be cut off."""
    size = settings.patch_size
    count, height, width, channels = clip.shape
    black = random.random((-(-height // size), -(-width // size))) < settings.black_prob
    keep = (~black).astype(np.uint8).repeat(size, 0).repeat(size * channels, 1)[:height, : width * channels]
    return (clip.reshape(count, height, width * channels) * keep).reshape(clip.shape)  # fastest in numpy by rows


def gaussian_noise(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    noise = random.standard_normal(clip.shape[1:], dtype=np.float32) * settings.noise_std
    return np.clip(clip + noise, 0, 255).astype(np.uint8)


def gaussian_blur(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    blur = ImageFilter.GaussianBlur(settings.blur_radius)
    return np.stack([np.asarray(Image.fromarray(frame).filter(blur)) for frame in clip])


def blank(clip: np.ndarray, random: np.random.Generator, settings: Perturbation) -> np.ndarray:
    return np.full_like(clip, MID_GREY)


# Functions of (clip [F, H, W, 3] uint8, generator, settings) by kind. `PERTURBATIONS["mine"] = f` adds one.
PERTURBATIONS: dict[str, Callable[[np.ndarray, np.random.Generator, Perturbation], np.ndarray]] = {
    each.__name__: each for each in (random_patch_blackening, gaussian_noise, gaussian_blur, blank)
}
