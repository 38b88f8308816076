"""An environment by TRL's documented contract: the model may look at parts of a picture before it answers.

Nothing is imported from a framework. In TRL it is GRPOTrainer(.., environment_factory=LookCloser).
"""

import random

from PIL import Image


class LookCloser:
    """A picture of a row (`images`), shown in a thumbnail; `crop` shows a part of it in full."""

    def reset(self, images, answer=None, **row):
        self.picture = images[0].convert("RGB")
        self.answer, self.looks = answer, 0
        hint = random.choice(["Look closely.", "Take your time."])
        return [
            {"type": "image", "image": self.picture.resize((56, 56), Image.Resampling.BILINEAR)},
            {"type": "text", "text": f" {hint} The picture has {self.picture.width} x {self.picture.height} pixels."},
        ]

    def crop(self, left: int, top: int, right: int, bottom: int) -> list:
        """
        Shows a part of the picture in full resolution.

        Args:
            left: The left edge in pixels.
            top: The top edge in pixels.
            right: The right edge in pixels.
            bottom: The bottom edge in pixels.

        Returns:
            The part as an image.
        """
        if not (0 <= left < right <= self.picture.width and 0 <= top < bottom <= self.picture.height):
            raise ValueError(f"the box must lie in the picture: 0..{self.picture.width}, 0..{self.picture.height}")
        self.looks += 1
        return [
            {"type": "text", "text": f"look {self.looks}:"},
            {"type": "image", "image": self.picture.crop((left, top, right, bottom))},
        ]

    async def count_colours(self, most: int = 3) -> dict:
        """
        Counts the pixels of the most frequent colours.

        Args:
            most: How many colours to name.
        """
        colours = self.picture.getcolors(self.picture.width * self.picture.height)
        return {str(colour): count for count, colour in sorted(colours, reverse=True)[:most]}

    def get_reward(self) -> float:
        """A little for every look, so that the model learns to look at all."""
        return 0.1 * min(self.looks, 3)
