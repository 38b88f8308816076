"""What a tiny Gemma 4 has of its own: special tokens and chat format, layers, settings of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

PATCH, POOL, BUDGET = 4, 2, 70  # pixels of a patch, patches of a side of a token, most tokens of an image
WINDOW = 10  # fewer than an image has tokens
SOFTCAP = 1.0  # published models have 30; random logits are far smaller
SHARERS = 2  # last layers without keys of their own
MARKS = {
    "image": "<|image|>", "boi": "<|image>", "eoi": "<image|>",
    "audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>", "video": "<|video|>",
}  # fmt: skip
SPECIAL_TOKENS = ["<bos>", "<|turn>", "<turn|>", *MARKS.values()]
TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}\n\n<|image|>\n\n{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def add_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.bos_token = "<bos>"
    tokenizer._set_model_specific_special_tokens({f"{name}_token": token for name, token in MARKS.items()})
    tokenizer.chat_template = TEMPLATE


def text_config(small: bool, hidden: int, heads: int, layers: int) -> dict[str, Any]:
    """Windows in every second layer, not in the last one; heads of the others are twice as wide. `small`: causal, with
    embeddings for every layer and shared keys; otherwise an image sees all of itself in layers with a window, and the
    keys of the others are their values."""
    kinds, total = ["full_attention", "sliding_attention"], layers + SHARERS * small
    width = hidden // heads
    shared: dict[str, Any] = {
        "num_hidden_layers": total, "layer_types": [kinds[(total - 1 - layer) % 2] for layer in range(total)],
        "sliding_window": WINDOW, "head_dim": width, "global_head_dim": 2 * width, "final_logit_softcapping": SOFTCAP,
        "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    if not small:
        more = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        return shared | more | {"use_bidirectional_attention": "vision"}
    return shared | {
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": SHARERS, "use_double_wide_mlp": True,
    }  # fmt: skip


def make_config(tokenizer: Any, text: dict[str, Any], vision_hidden: int, vision_layers: int) -> dict[str, Any]:
    """The configuration, with the second vocabulary of the text model."""
    small = bool(text["hidden_size_per_layer_input"])
    text = text | {"vocab_size_per_layer_input": text["vocab_size"], "pad_token_id": text["bos_token_id"]}
    vision = {
        "hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "num_hidden_layers": vision_layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": vision_hidden // 4, "patch_size": PATCH,
        "pooling_kernel_size": POOL, "position_embedding_size": BUDGET * POOL, "use_clipped_linears": small,
        "standardize": not small,
    }  # fmt: skip
    audio = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 2],
        "output_proj_dims": 16,
    }  # fmt: skip
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    return {"text_config": text, "vision_config": vision, "audio_config": audio if small else None, **ids}


@torch.no_grad()
def fill_weights(model: Any) -> None:
    """What transformers initializes without effect: positions of patches, the factor of each layer, bounds within the
    tower, the scale of its features."""
    model.model.vision_tower.patch_embedder.position_embedding_table.normal_(std=model.config.initializer_range)
    for number, layer in enumerate(model.model.language_model.layers):
        layer.layer_scalar.fill_(1 - number / 8)
    tower = dict(model.model.vision_tower.named_buffers())
    for name, buffer in tower.items():
        if name.endswith(("_min", "_max")):
            buffer.fill_(2.0 if name.endswith("_max") else -2.0)
        elif name in ("std_bias", "std_scale"):
            buffer.uniform_(0.5, 1.5)


def write_settings(directory: Path) -> None:
    """Write processor_config.json, which holds the settings of images, videos and sounds."""
    sizes = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": BUDGET}
    images = {
        "image_processor_type": "Gemma4ImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0], **sizes,
    }  # fmt: skip
    processor = {
        "processor_class": "Gemma4Processor", "image_seq_length": BUDGET, "image_processor": images,
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **sizes},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    }  # fmt: skip
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
