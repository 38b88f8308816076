"""A tiny LLaVA 1.5 with random weights, in the files of the published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_models import SHARPER
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration

from mtrl.models.tiny_tokenizer import tiny_tokenizer

SIDE, PATCH = 56, 14
TOKENS = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
IMAGES = {
    "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
    "do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
    "size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "resample": 3,
    "rescale_factor": 1 / 255, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip
PROCESSOR = {
    "image_token": "<image>", "patch_size": PATCH, "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1, "processor_class": "LlavaProcessor",
}  # fmt: skip


def make_tiny_llava(directory: Path, layers: int = 3, hidden: int = 64) -> Path:
    tokenizer = tiny_tokenizer(False)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    shared = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "num_hidden_layers": layers,
            "num_key_value_heads": 2, "eos_token_id": end, "bos_token_id": None, **shared,
        },
        vision_config={
            "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, "num_hidden_layers": 2,
            "projection_dim": hidden, **shared,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=TOKENS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARPER if parameter.dim() > 1 else 1)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    return directory
