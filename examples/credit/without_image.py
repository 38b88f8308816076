"""A weight that reads another view: tokens that the model would choose otherwise without the image count for more.

optimization:
  credit: [{name: examples/credit/without_image.py:NeedsImage, strength: 0.5}]
"""

from dataclasses import dataclass
from math import log

from mtrl import Needs, Weight


@dataclass(frozen=True)
class NeedsImage(Weight):
    """1 + strength * JSD / log 2: from 1, where the image changes nothing, to 1 + strength."""

    strength: float = 1.0
    needs = Needs("jsd@none")  # between the distributions with the image and without its tokens

    def apply(self, experience, key):
        return 1 + self.strength * experience.signals.extra["jsd@none"] / log(2)
