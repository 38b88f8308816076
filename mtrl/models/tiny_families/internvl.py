"""What a tiny InternVL has of its own: special tokens and chat format, vision tower, settings of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mtrl.models.tiny_tokenizer import TURNS

SIDE, PATCH, MOST_TILES = 56, 14, 12
MARKS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
TEMPLATE = TURNS.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in MARKS.values()])
    tokenizer._set_model_specific_special_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE


def make_config(
    tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int, side: int = SIDE
) -> dict[str, Any]:  # fmt: skip
    """What the configuration has beside that of the text model."""
    vision = {
        "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "num_hidden_layers": vision_layers,
        "num_attention_heads": 4, "image_size": [side, side], "patch_size": [PATCH, PATCH],
    }  # fmt: skip
    mark = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    return {
        "vision_config": vision,
        "image_token_id": mark,
        "image_seq_length": count_tokens(side),
        "tie_word_embeddings": True,
    }


def count_tokens(side: int) -> int:
    """Of a tile: four patches make one."""
    return (side // PATCH // 2) ** 2


def write_settings(directory: Path, side: int | None = None) -> None:
    """Write the settings of images and of the processor with the keys of the published checkpoints. With a `side` an
    image is one tile of this size, otherwise several."""
    most, side = 1 if side else MOST_TILES, side or SIDE
    images = {
        "image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor",
        "size": {"height": side, "width": side}, "resample": 3, "crop_to_patches": False, "min_patches": 1,
        "max_patches": most, "do_resize": True, "do_convert_rgb": True, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": count_tokens(side)}
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
