"""What a tiny GLM-4.1V or GLM-4.5V has of its own: special tokens and chat format, layers, settings of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

PATCH = 14
MARKS = {
    "image": "<|image|>", "image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>",
    "video": "<|video|>", "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>",
}  # fmt: skip
SPECIAL_TOKENS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", *MARKS.values()]
TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}\n<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}"
)


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = TEMPLATE


READ_BY_VLLM = {"attention_bias": True, "use_qk_norm": False}  # transformers does not read them
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}


def text_config(family: str, hidden: int, heads: int) -> dict[str, Any]:
    """Half of a head has rotary positions. GLM-4.5V has experts in all layers but the first."""
    pairs = hidden // heads // 4
    side = pairs // 3
    rope = {"mrope_section": [pairs - 2 * side, side, side], "partial_rotary_factor": 0.5}
    config: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}}
    if family == "glm4v":
        return config | READ_BY_VLLM
    return config | READ_BY_VLLM | EXPERTS | {"moe_intermediate_size": hidden, "head_dim": hidden // heads}


def make_config(tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int) -> dict[str, Any]:
    """What the configuration has beside that of the text model."""
    vision = {
        "depth": vision_layers, "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "num_heads": 4,
        "image_size": 8 * PATCH, "patch_size": PATCH, "out_hidden_size": text["hidden_size"],
    }  # fmt: skip
    marks = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    return {"vision_config": vision, "tie_word_embeddings": True, **marks}


def write_settings(directory: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
    """Write preprocessor_config.json with the keys of the published checkpoints."""
    area = (2 * PATCH) ** 2
    limits = {"shortest_edge": 2 * (min_pixels or 4 * area), "longest_edge": 2 * (max_pixels or 1280 * area)}
    images = {
        "image_processor_type": "Glm4vImageProcessor", "processor_class": "Glm4vProcessor", "size": limits,
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "do_rescale": True, "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
