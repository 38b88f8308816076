"""What a tiny Idefics3 or SmolVLM has of its own: special tokens and chat format, vision tower, settings of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

SIDE, PATCH, LONGEST = 56, 14, 168  # pixels of a tile, of a patch, of the longer side of an image
MARKS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
}
SPECIAL_TOKENS = [
    *MARKS.values(), "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer._set_model_specific_special_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE


def make_config(
    tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int, side: int = SIDE
) -> dict[str, Any]:  # fmt: skip
    """What the configuration has beside that of the text model."""
    vision = {
        "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "num_hidden_layers": vision_layers,
        "num_attention_heads": 4, "image_size": side, "patch_size": PATCH,
    }  # fmt: skip
    mark = tokenizer.convert_tokens_to_ids("<image>")
    return {"vision_config": vision, "image_token_id": mark, "scale_factor": 2, "tie_word_embeddings": True}


def count_tokens(side: int) -> int:
    """Of a tile: four patches make one."""
    return (side // PATCH // 2) ** 2


def write_settings(directory: Path, side: int | None = None) -> None:
    """Write the settings of images and of the processor with the keys of the published checkpoints. With a `side` an
    image is one tile of this size, otherwise several."""
    longest, side = side or LONGEST, side or SIDE
    images = {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}, "do_image_splitting": True,
        "do_resize": True, "resample": 1, "do_convert_rgb": True, "do_pad": True, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": count_tokens(side)}
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
