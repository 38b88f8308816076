"""The environments of the embedded task `lookagain`: a zoom into its picture, and one that shows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from mtrl.environments.image_tools import ImageTools

GREY = (127, 127, 127)


class LookAgain:
    """`ImageTools` has more tools, and says more, than a model of three million parameters can read."""

    def reset(self, images: Sequence[Any], image_sizes: Sequence[Sequence[int]], **row: Any) -> None:
        self._tools = ImageTools()
        self._tools.reset(images, image_sizes)

    def zoom(self, box: list[float]) -> list:
        """Shows a part of the picture enlarged.

        Args:
            box: Left, top, right, bottom.
        """
        _, image = self._tools.zoom(box)
        return [image]


class BlankLookAgain(LookAgain):
    """A control, on which nothing can be learned by zooming: the same tool with grey pictures."""

    def zoom(self, box: list[float]) -> list:
        """Shows a part of the picture enlarged.

        Args:
            box: Left, top, right, bottom.
        """
        (image,) = super().zoom(box)
        return [{"type": "image", "image": Image.new("RGB", image["image"].size, GREY)}]
