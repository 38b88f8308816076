"""Make tiny random checkpoints of every model family, for tests and for trying a setup without a download.

    directory = make_tiny_checkpoint("tiny", "qwen3_vl")
    AutoModelForImageTextToText.from_pretrained(directory)

They have the layout of the published checkpoints (config, safetensors, tokenizer with the family's special tokens and
chat format, image settings, generation config) and about 300,000 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mtrl.models.tiny_families import GEMMA4_FAMILIES, ONE_SQUARE, OWN_PARTS, gemma, gemma4, glm
from mtrl.models.tiny_tokenizer import (
    VOCABULARY,
    WORDS,
    end_token_ids,
    make_generation_config,
    media_token_ids,
    tiny_tokenizer,
    write_image_settings,
)

QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
VISION_FAMILIES = (*QWEN_FAMILIES, "gemma3")
TINY_FAMILIES = (*VISION_FAMILIES, "qwen2", "gemma3_text")  # in the tests of passes, generation, checkpoints, ..
OTHER_TEXT_FAMILIES = ("qwen3", "llama")
OTHER_VISION_FAMILIES = (
    "qwen3_vl_moe", "internvl", "idefics3", "smolvlm", "llava_onevision", "glm4v", "glm4v_moe", *GEMMA4_FAMILIES
)  # fmt: skip
CHECKED_FAMILIES = (*TINY_FAMILIES, *OTHER_VISION_FAMILIES, *OTHER_TEXT_FAMILIES)  # those of docs/models.md
TEXT_FAMILIES = ("qwen2", "gemma3_text", *OTHER_TEXT_FAMILIES)


def make_tiny_checkpoint(
    directory: str | Path,
    family: str = "qwen2_5_vl",
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    recurrent_head: int | None = None,
    vision_hidden: int = 64,
    vision_layers: int = 2,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    words: str = WORDS,
    added_tokens: Sequence[str] = (),
    vocabulary: int = VOCABULARY,
) -> Path:
    """Write a loadable Hugging Face directory with random weights; the same arguments give the same bytes.

    `layers` have attention and keys; hybrid families have as many recurrent ones between them, whose heads are
    `recurrent_head` wide (None: as in attention); a small Gemma 4 has two more that share keys. Pixel limits default to
    4 and 1280 tokens per image for Qwen and GLM; the towers of other families read squares of one size, and with
    `max_pixels` an image of ONE_SQUARE is one such square. The tokenizer is trained on `words`, up to `vocabulary`
    tokens, and each of `added_tokens` is a single token. The caller's random state is not changed.
    """
    if family not in CHECKED_FAMILIES:
        raise ValueError(f"no tiny checkpoint for family {family!r}; there are {', '.join(CHECKED_FAMILIES)}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    own = OWN_PARTS.get(family)
    words += getattr(own, "MORE_WORDS", "")
    tokenizer = tiny_tokenizer(not family.startswith("qwen3"), words, tuple(added_tokens), vocabulary)
    if own is not None:
        own.add_tokens(tokenizer)
    tokenizer.save_pretrained(directory)

    end, pad = end_token_ids(tokenizer)
    text = _text_config(family, hidden, layers, heads, kv_heads, recurrent_head or hidden // heads)
    text |= {"vocab_size": len(tokenizer), "bos_token_id": pad, "eos_token_id": end}
    loader: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    if family in TEXT_FAMILIES:
        config = AutoConfig.for_model(family, **text)
    elif own is not None:
        square = {"side": isqrt(max_pixels)} if max_pixels and own in ONE_SQUARE else {}
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels} if own is glm else square
        more = own.make_config(tokenizer, text, vision_hidden, vision_layers, **square)
        config = AutoConfig.for_model(model_type(family), **{"text_config": text} | more)
        own.write_settings(directory, **limits)
    else:
        marks = media_token_ids(tokenizer)
        vision = _vision_config(family, hidden, vision_hidden, vision_layers)
        config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
        write_image_settings(directory, family, vision["patch_size"], min_pixels, max_pixels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = loader.from_config(config, dtype=torch.float32)
        if hasattr(own, "fill_weights"):
            own.fill_weights(model)
    model.generation_config = make_generation_config(tokenizer)
    model.save_pretrained(directory)
    if hasattr(own, "publish_names"):
        own.publish_names(directory)
    return directory


def model_type(family: str) -> str:
    """The type of a family in config.json."""
    return "gemma4" if family in GEMMA4_FAMILIES else family


def _text_config(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, recurrent_head: int
) -> dict[str, Any]:  # fmt: skip
    shared = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "use_cache": True,
    }  # fmt: skip
    if family in GEMMA4_FAMILIES:
        return shared | gemma4.text_config(family == "gemma4", hidden, heads, layers)
    if family.startswith("gemma3"):
        return shared | gemma.text_config(hidden, heads, layers)
    if family.startswith("glm4v"):
        return shared | glm.text_config(family, hidden, heads)
    half = hidden // heads // 2  # rotary pairs of a head, divided among time, height and width
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if family.startswith("qwen3_5"):
        half //= 2  # half of a head has no rotary positions
        rope |= {"partial_rotary_factor": 0.5}
    if family in (*QWEN_FAMILIES, "qwen3_vl_moe"):
        new = family.startswith("qwen3")
        side = half * (20 if new else 24) // 64
        rope |= {"mrope_section": [half - 2 * side, side, side]} | ({"mrope_interleaved": True} if new else {})
    config = shared | {"rope_parameters": rope}
    if family.startswith("qwen3"):
        config |= {"head_dim": hidden // heads}
    if family.startswith("qwen3_5"):  # a recurrent layer before each one with attention
        widths = {f"linear_{name}_head_dim": recurrent_head for name in ("key", "value")}
        config |= {"linear_num_key_heads": kv_heads, "linear_num_value_heads": heads, **widths}
        config |= {"num_hidden_layers": 2 * layers, "layer_types": ["linear_attention", "full_attention"] * layers}
    if family.endswith("moe"):
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    if family == "qwen3_5_moe":
        config |= {"shared_expert_intermediate_size": hidden}
    return config


def _vision_config(family: str, hidden: int, vision_hidden: int, depth: int) -> dict[str, Any]:
    shared = {"depth": depth, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":  # its "hidden_size" is the width of the text model
        return shared | {"embed_dim": vision_hidden, "hidden_size": hidden, "mlp_ratio": 2, "patch_size": 14}
    shared |= {"hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        return shared | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [depth - 1]}
    shared |= {"patch_size": 16, "num_position_embeddings": 256}
    return shared | ({"deepstack_visual_indexes": [0]} if family.startswith("qwen3_vl") else {})
