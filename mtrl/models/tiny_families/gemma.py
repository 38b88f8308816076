"""What a tiny Gemma 3 has of its own: special tokens and chat format, layers, settings of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

SIDE, PATCH, POOL = 112, 14, 2  # pixels of an image's side and of a patch's; patches of the side of a token
TOKENS = (SIDE // PATCH // POOL) ** 2  # of an image
WINDOW = 10  # fewer than an image has tokens
MARKS = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
SPECIAL_TOKENS = ["<bos>", "<start_of_turn>", "<end_of_turn>", *MARKS.values()]
MORE_WORDS = " " + "\n\n\n".join(40 * ["."])  # for the tokenizer: as Gemma's, it has tokens of several line breaks
TEMPLATE = (
    "{{ '<bos>' }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if loop.first %}{{ first }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.bos_token = "<bos>"
    tokenizer._set_model_specific_special_tokens({f"{name}_token": token for name, token in MARKS.items()})
    tokenizer.chat_template = TEMPLATE


def text_config(hidden: int, heads: int, layers: int) -> dict[str, Any]:
    """Windows in every second layer, not in the last one."""
    kinds = ["full_attention", "sliding_attention"]
    return {
        "head_dim": hidden // heads, "query_pre_attn_scalar": hidden // heads, "sliding_window": WINDOW,
        "layer_types": [kinds[(layers - 1 - layer) % 2] for layer in range(layers)],
    }  # fmt: skip


def make_config(
    tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int, side: int = SIDE, pool: int = POOL
) -> dict[str, Any]:  # fmt: skip
    """What the configuration has beside that of the text model."""
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden,
        "num_hidden_layers": vision_layers, "num_attention_heads": 4, "image_size": side, "patch_size": PATCH,
        "vision_use_head": False,
    }  # fmt: skip
    marks = {f"{name}_token_index": tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    return {"vision_config": vision, "mm_tokens_per_image": count_tokens(side, pool), **marks}


@torch.no_grad()
def fill_weights(model: Any) -> None:
    """The projection of image features, which transformers initializes with zeros: as large as the embeddings."""
    if hasattr(model.model, "multi_modal_projector"):
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=model.config.initializer_range)


def count_tokens(side: int, pool: int) -> int:
    return (side // PATCH // pool) ** 2


def write_settings(directory: Path, side: int = SIDE, pool: int = POOL) -> None:
    """Write the settings of images and of the processor with the keys of the published checkpoints."""
    images = {
        "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor",
        "size": {"height": side, "width": side}, "resample": 2, "do_pan_and_scan": None, "do_resize": True,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "image_seq_length": count_tokens(side, pool),
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": count_tokens(side, pool)}
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
