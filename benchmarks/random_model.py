"""Inputs of the benchmarks: a model of random weights, prompts with pictures of noise, and random responses.

`3b` has the shape of Qwen2.5-VL-3B (3.75 B parameters), `7b` that of Qwen2.5-VL-7B (8.29 B), `qwen3.5-4b` that of a
Qwen3.5 with 4.5 B; `tiny` and `qwen3.5-tiny` are for trying a benchmark on a CPU.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.types import VISION_POOL, Medium, Prompt, Rollouts, Task
from pretraining.tiny_checkpoints import WORDS, make_tiny_checkpoint

TEXT = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    },
    "3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "qwen3.5-tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 32, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
                            "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "qwen3.5-4b": {  # every fourth layer has attention
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
}  # fmt: skip
VISION = {
    "tiny": {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128,
             "fullatt_block_indexes": [1]},
    "3b": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
           "fullatt_block_indexes": [7, 15, 23, 31]},
    "7b": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
           "fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3.5-tiny": {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128},
    "qwen3.5-4b": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                   "out_hidden_size": 2560},
}  # fmt: skip
SIZES = tuple(TEXT)
OWN_OUTPUT_MATRIX = ("7b",)  # sizes whose output matrix is not tied to the embedding
PATCHES = {
    "qwen2_5_vl": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
    "qwen3_5": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def find_family(size: str) -> str:
    return "qwen3_5" if size.startswith("qwen3.5") else "qwen2_5_vl"


def token_pixels(size: str) -> int:
    """Side in pixels of the square that becomes one image token."""
    patches = PATCHES[find_family(size)]
    return patches["patch_size"] * patches["spatial_merge_size"]


def random_backbone(
    size: str, device: str, weights: str, compute: str | None = None, *, checkpointing: bool = True, seed: int = 0
) -> tuple[TextEncoder, Backbone]:
    """`weights` and `compute`: bf16 or fp32; weights of fp32 with bf16 products are master weights."""
    with tempfile.TemporaryDirectory() as directory:
        encoder = load_encoder(make_tiny_checkpoint(directory, find_family(size), max_pixels=10**8))
        model = random_model(Path(directory), size, device, weights, seed)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return encoder, Backbone(model.eval(), DTYPES[compute or weights])


def random_checkpoint(directory: Path, size: str, device: str, seed: int = 0) -> Path:
    """A Hugging Face folder of that shape for `worker.actor.model.model_path`, in bf16 as they are published."""
    checkpoint_without_weights(directory, size)
    random_model(directory, size, device, "bf16", seed).save_pretrained(directory)
    return directory


def checkpoint_without_weights(directory: Path, size: str) -> Path:
    """The same without weights; the caller draws them. Writing and reading gigabytes would take longer than a step."""
    make_tiny_checkpoint(directory, find_family(size), max_pixels=10**8)
    (directory / "model.safetensors").unlink()  # the tiny model's weights
    random_config(directory, size).save_pretrained(directory)
    return directory


def random_model(tiny: Path, size: str, device: str, weights: str, seed: int) -> Any:
    """Random weights of that shape for the tokenizer of a tiny checkpoint, drawn on the device in their dtype."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(
            random_config(tiny, size), dtype=DTYPES[weights], attn_implementation="sdpa"
        )


def random_config(tiny: Path, size: str) -> Any:
    marks = AutoConfig.from_pretrained(tiny)
    ends = {name: getattr(marks.text_config, name) for name in ("bos_token_id", "eos_token_id")}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tied = size not in OWN_OUTPUT_MATRIX
    return AutoConfig.for_model(
        find_family(size),
        text_config=TEXT[size] | ends | {"tie_word_embeddings": tied, "max_position_embeddings": 128_000},
        vision_config=VISION[size] | PATCHES[find_family(size)],
        tie_word_embeddings=tied,
        **{name: getattr(marks, name) for name in names},
    )


def random_prompts(
    encoder: TextEncoder, count: int, sides: Sequence[int], text_tokens: int, seed: int = 0
) -> list[Prompt]:
    """Prompts of a square picture (sides in pixels, in turn) and `text_tokens` other tokens, template included."""
    questions = random_questions(encoder, count, sides, text_tokens, seed)
    return [encode(encoder, number, text, image) for number, (text, image) in enumerate(questions)]


def random_questions(
    encoder: TextEncoder, count: int, sides: Sequence[int], text_tokens: int, seed: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """The texts and pictures of `random_prompts`."""
    words = [word for word in WORDS.split() if len(encoder.tokenizer(f" {word}")["input_ids"]) == 1]
    draw, noise = random.Random(seed), np.random.default_rng(seed)
    for number in range(count):
        side = sides[number % len(sides)]
        image = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
        prompt = encode(encoder, number, "", image)
        spare = text_tokens - int((prompt.token_pool != VISION_POOL).sum())
        yield "".join(f" {draw.choice(words)}" for _ in range(max(1, spare))), image


def encode(encoder: TextEncoder, number: int, text: str, image: np.ndarray) -> Prompt:
    content = [{"type": "image"}, {"type": "text", "text": text}]
    task = Task(f"noise:{number}", f"noise {number}", ({"role": "user", "content": content},), (Medium("image", None),))
    return encoder.encode(task, [image])


def random_rollouts(prompts: Sequence[Prompt], responses: int, lengths: tuple[int, int], seed: int = 0) -> Rollouts:
    """`responses` of random plain tokens per prompt, with lengths drawn between the two."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(prompts) * responses
    length = torch.randint(lengths[0], lengths[1] + 1, (rows,), generator=draw)
    mask = torch.arange(lengths[1]) < length[:, None]
    tokens = torch.randint(30, 480, mask.shape, generator=draw).where(mask, 0)
    return Rollouts(
        prompts=tuple(prompts), group=torch.arange(len(prompts)).repeat_interleave(responses), tokens=tokens, mask=mask,
        rollout_logprobs=torch.full(mask.shape, -7.0), text=("",) * rows, finish_reason=("length",) * rows,
        version=torch.zeros(rows, dtype=torch.long),
    )  # fmt: skip
