"""The one way in which images are resized: data, environments and reward models must agree to the bit."""

from __future__ import annotations

import numpy as np
from PIL import Image


def resize_image(image: np.ndarray | Image.Image, height: int, width: int) -> np.ndarray:
    """[height, width, 3] of an RGB image, by PIL's bicubic filter. An array that has this size already is returned."""
    if not isinstance(image, Image.Image):
        if image.shape[:2] == (height, width):
            return image
        image = Image.fromarray(image)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)
