"""Your own model family: LLaVA 1.5. Name it in a YAML:

worker:
  actor:
    model: {model_path: llava-hf/llava-1.5-7b-hf, family: examples/families/llava.py:Llava}
"""

import math

from mtrl.models.families import ModelFamily, VisionEncoder
from mtrl.models.families.vision import check_aspect
from mtrl.protocols import ImageSettings


class LlavaEncoder(VisionEncoder):
    """The shorter side of an image gets as many pixels as the vision tower takes. The model sees the square in its
    centre, so every image has the same number of tokens, and the pixel limits of the dataset do not apply."""

    @classmethod
    def read_image_settings(cls, saved, config, min_pixels, max_pixels):
        side, crop = saved["size"]["shortest_edge"], saved["crop_size"]
        if (crop["height"], crop["width"], config.vision_feature_select_strategy) != (side, side, "default"):
            raise ValueError("LLaVA with another crop than a square of the shorter side, or with a class token")
        return ImageSettings(
            patch_size=config.vision_config.patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=side * side,
            max_pixels=side * side,
            rescale_factor=saved["rescale_factor"],
            image_mean=tuple(saved["image_mean"]),
            image_std=tuple(saved["image_std"]),
        )

    def target_size(self, height, width):
        check_aspect(height, width)
        side, shorter = math.isqrt(self.image_settings.max_pixels), min(height, width)
        return int(side * height / shorter), int(side * width / shorter)

    def visible_size(self, height, width):
        return min(height, width), min(height, width)

    def largest_image(self, tokens):
        return self.target_size(1, 1)


class Llava(ModelFamily):
    encoder = LlavaEncoder
    vision_tower = "model.vision_tower"
    projector = "model.multi_modal_projector"
    shares_prefix = True  # causal, one axis of positions; compared with responses that compute their own prompt
