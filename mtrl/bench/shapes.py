"""The shapes of models that can be measured, and checkpoints of these shapes with random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrl.models.random_model import draw_model, write_checkpoint_files


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as the sections of its config.json."""

    title: str
    family: str
    token_pixels: int  # side in pixels of the square that becomes one image token
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tied: bool = True  # the output matrix is the embedding
    square: Mapping[str, int] = field(default_factory=dict)  # a tower that reads pictures of one size: their side

    def image_side(self, tokens: int) -> int:
        """Side in pixels of the smallest square image of at least so many tokens, or of any image.

        >>> SHAPES["3b"].image_side(570), SHAPES["3b"].image_tokens(672)
        (672, 576)
        >>> SHAPES["gemma3-4b"].image_side(570), SHAPES["gemma3-4b"].image_tokens(896)
        (896, 256)
        """
        return self.square.get("side") or (math.isqrt(tokens - 1) + 1) * self.token_pixels

    def image_tokens(self, side: int) -> int:
        return (side // self.token_pixels) ** 2


QWEN2_5_VL = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
QWEN3_5 = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31], **QWEN2_5_VL,
}  # fmt: skip
TINY_TOWER = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128}
TINY_TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e6}
INTERLEAVED_ROPE = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True}

SHAPES = {
    "tiny": Shape(
        "a tiny Qwen2.5-VL",
        "qwen2_5_vl",
        28,
        text={**TINY_TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
        vision={**TINY_TOWER, **QWEN2_5_VL, "fullatt_block_indexes": [1]},
    ),
    "3b": Shape(
        "Qwen2.5-VL-3B",
        "qwen2_5_vl",
        28,
        text={
            "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936,
            "rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]},
        },
        vision={**TOWER, "out_hidden_size": 2048},
    ),
    "7b": Shape(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        28,
        text={
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064,
            "rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]},
        },
        vision={**TOWER, "out_hidden_size": 3584},
        tied=False,
    ),
    "qwen3.5-tiny": Shape(
        "a tiny Qwen3.5",
        "qwen3_5",
        32,
        text={
            **TINY_TEXT, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "rope_parameters": {**INTERLEAVED_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
        },
        vision={**TINY_TOWER, **QWEN3_5},
    ),
    "qwen3.5-4b": Shape(
        "a Qwen3.5 of 4.5 B",
        "qwen3_5",
        32,
        text={  # every fourth layer has attention
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "rope_parameters": {**INTERLEAVED_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        },
        vision={
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
            **QWEN3_5,
        },
    ),
    "gemma3-4b": Shape(
        "Gemma-3-4B",
        "gemma3",
        56,
        text={  # every sixth layer sees more than a window
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 262208, "head_dim": 256, "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        vision={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        },
        square={"side": 896, "pool": 4},
    ),
    "internvl-2b": Shape(
        "InternVL3.5-2B",
        "internvl",
        28,
        text={
            "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128,
            "rope_parameters": ROPE,
        },
        vision={
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        },
        square={"side": 448},
    ),
}  # fmt: skip


def write_files(directory: Path, size: str) -> Path:
    """A Hugging Face folder of that shape without weights; the caller draws them. Writing and reading gigabytes would
    take longer than a step."""
    shape = SHAPES[size]
    return write_checkpoint_files(
        directory, shape.family, shape.text, shape.vision, tied=shape.tied, square=shape.square
    )


def write_checkpoint(directory: Path, size: str, device: str, seed: int = 0) -> Path:
    """The same with weights, in bf16 as they are published."""
    draw_model(write_files(directory, size), device, "bf16", seed).save_pretrained(directory)
    return directory
