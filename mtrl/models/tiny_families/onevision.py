"""What a tiny LLaVA-OneVision has of its own: special tokens and chat format, vision tower, settings of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

SIDE, PATCH, MOST_TILES = 60, 14, 4  # pixels of a tile, which are no whole patches, as the published; tiles of a side
TOKENS = (SIDE // PATCH) ** 2  # of a tile
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in range(1, MOST_TILES + 1) for columns in range(1, MOST_TILES + 1)]
MARKS = {"image_token": "<image>", "video_token": "<video>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'video' %}<video>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}\n{{ part['text'] }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in MARKS.values()])
    tokenizer._set_model_specific_special_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE


def make_config(tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int) -> dict[str, Any]:
    """What the configuration has beside that of the text model."""
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden,
        "num_hidden_layers": vision_layers, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
        "vision_use_head": False,
    }  # fmt: skip
    marks = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    return {"vision_config": vision, "image_grid_pinpoints": PINPOINTS, "tie_word_embeddings": True, **marks}


@torch.no_grad()
def fill_weights(model: Any) -> None:
    """The projections of the tower's layers, which transformers initializes six times as large as the language
    model's: attention is so sharp then that rounding moves gradients that should be 0."""
    for weight in model.model.vision_tower.encoder.layers.parameters():
        if weight.dim() > 1:
            weight.normal_(std=model.config.text_config.initializer_range)


def publish_names(directory: Path) -> None:
    """The names of published weights, which vLLM reads. transformers has others for the tower since it has no module
    between; it reads both, and writes those that it has read."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def write_settings(directory: Path) -> None:
    """Write the settings of images and of the processor with the keys of the published checkpoints."""
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": PINPOINTS, "resample": 3, "do_resize": True,
        "do_pad": True, "do_convert_rgb": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {
        "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": TOKENS,
        "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9", **MARKS,
    }  # fmt: skip
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
