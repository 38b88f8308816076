"""Tiny random vision-language models of families that MTRL does not describe, each with its own Processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import SHARPER
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerBase

from mtrl.cli import main
from mtrl.models.tiny_tokenizer import tiny_tokenizer

SIDE, PATCH = 28, 14
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = LAYER | {"num_key_value_heads": 2, "head_dim": 8}
VISION = LAYER | {"image_size": SIDE, "patch_size": PATCH}
SQUARE = {"height": SIDE, "width": SIDE}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]

Parts = tuple[dict[str, Any], Any]  # arguments of the configuration, and the processor


def llava_next(tokenizer: PreTrainedTokenizerBase) -> Parts:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    config = {
        "text_config": {"model_type": "llama", **TEXT}, "image_grid_pinpoints": PINPOINTS,
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }  # fmt: skip
    return config, processor


def idefics3(tokenizer: PreTrainedTokenizerBase) -> Parts:
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=1)
    config = {
        "text_config": {"model_type": "llama", **TEXT}, "scale_factor": 2, "vision_config": VISION,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
    }  # fmt: skip
    return config, processor


def paligemma(tokenizer: PreTrainedTokenizerBase) -> Parts:
    images = transformers.SiglipImageProcessorPil(size=SQUARE)
    images.image_seq_length = 4
    config = {
        "text_config": {"model_type": "gemma", **TEXT}, "projection_dim": 32,
        "vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32, **VISION},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }  # fmt: skip
    return config, transformers.PaliGemmaProcessor(images, tokenizer)


WINDOW = 6
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def gemma3(tokenizer: PreTrainedTokenizerBase, text: dict[str, Any] = WINDOWS) -> Parts:
    images = transformers.Gemma3ImageProcessorPil(size=SQUARE)
    tokenizer._set_model_specific_special_tokens({f"{name}_token": f"<{name}>" for name in ("boi", "eoi", "image")})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    config = {
        "text_config": {"model_type": "gemma3_text", **TEXT, **text}, "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        **{f"{name}_token_index": tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("boi", "eoi", "image")},
    }  # fmt: skip
    return config, processor


def gemma3_full(tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Without sliding layers: only the mask of its images differs from a causal one."""
    return gemma3(tokenizer, {"layer_types": ["full_attention"] * 2})


def internvl(tokenizer: PreTrainedTokenizerBase) -> Parts:
    images = transformers.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    names = {"start_image_token": "<boi>", "end_image_token": "<eoi>", "context_image_token": "<image>"}
    tokenizer._set_model_specific_special_tokens(names | {"video_token": "<video>"})
    videos = transformers.InternVLVideoProcessor(size=SQUARE)
    processor = transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=1)
    config = {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "image_seq_length": 1,
    }  # fmt: skip
    return config, processor


def llava_onevision(tokenizer: PreTrainedTokenizerBase) -> Parts:
    images = transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=PINPOINTS)
    videos = transformers.LlavaOnevisionVideoProcessor(size=SQUARE)
    processor = transformers.LlavaOnevisionProcessor(
        images, tokenizer, videos, num_image_tokens=4, vision_feature_select_strategy="full"
    )
    config = {
        "text_config": {"model_type": "qwen2", **TEXT}, "image_grid_pinpoints": PINPOINTS,
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "video_token_index": tokenizer.convert_tokens_to_ids("<video>"),
    }  # fmt: skip
    return config, processor


MARKS = {"gemma3": "<boi>", "gemma3_full": "<boi>"}  # what a chat template writes for an image; others write <image>
MAKERS: dict[str, Callable[[PreTrainedTokenizerBase], Parts]] = {
    each.__name__: each for each in (llava_next, idefics3, paligemma, gemma3, gemma3_full, internvl, llava_onevision)
}


def make_tiny_vlm(directory: Path, name: str) -> Path:
    tokenizer = tiny_tokenizer(False)
    tokenizer.add_tokens(
        ["<image>", "<video>", "<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))], special_tokens=True,
    )  # fmt: skip
    tokenizer.bos_token = "<|endoftext|>"
    settings, processor = MAKERS[name](tokenizer)
    processor.chat_template = TEMPLATE.replace("IMAGE", MARKS.get(name, "<image>"))
    tokenizer.chat_template = processor.chat_template
    processor.save_pretrained(directory)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings["text_config"] |= {
        "vocab_size": len(tokenizer), "eos_token_id": end, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(name.removesuffix("_full"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name_of_weight, parameter in model.named_parameters():
            if name_of_weight.endswith("mm_input_projection_weight"):  # Gemma's starts at zero
                parameter.normal_(generator=torch.Generator().manual_seed(0))
            parameter.mul_(SHARPER if parameter.dim() > 1 else 1)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    return directory


def train_one_step(model, *words):
    """The exit status of `mtrl train` in the current folder, on two questions about a picture of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("a.png")
    row = {"prompt": "<image>which colour?", "images": ["a.png"], "answer": "red"}
    Path("train.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    Path("mine.py").write_text("def mine(data):\n    return sum(data['response_token_ids']) % 7 / 7\n")
    settings = (
        "dataset.train_files=train.jsonl dataset.rollout_batch_size=2 training.logger=[] training.max_steps=1 "
        "worker.actor.global_batch_size=2 worker.actor.fsdp.mixed_precision_dtype=fp32 "
        "worker.reward.functions=[mine.py:mine] worker.reward.num_cpus=1 optimization.enable_perception_filtering=true"
    )
    return main(["train", *settings.split(), f"worker.actor.model.model_path={model}", *words])
