"""Models of random weights: the files of a checkpoint without its weights, and the weights drawn on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mtrl.models.families import load_model_config
from mtrl.models.load_model import DTYPES, LOADING, find_model_class
from mtrl.models.tiny_families import OWN_PARTS
from mtrl.models.tiny_tokenizer import (
    end_token_ids,
    make_generation_config,
    media_token_ids,
    tiny_tokenizer,
    write_image_settings,
)

LONGEST = 128_000  # positions of a text
LARGEST_IMAGE = 10**8  # pixels; a run has its own limit, which is smaller


def write_checkpoint_files(
    directory: Path, family: str, text: Mapping[str, Any], vision: Mapping[str, Any], *, tied: bool,
    square: Mapping[str, int],
) -> Path:  # fmt: skip
    """Write config, tokenizer and image settings of a model of this shape. `tied`: its output matrix is the embedding.
    `square`: what is said of the images of a tower that reads squares of one size."""
    own = OWN_PARTS.get(family)
    tokenizer = tiny_tokenizer(not family.startswith("qwen3"))
    if own is not None:
        own.add_tokens(tokenizer)
    tokenizer.save_pretrained(directory)
    make_generation_config(tokenizer).save_pretrained(directory)
    end, pad = end_token_ids(tokenizer)
    text = {**text, "bos_token_id": pad, "eos_token_id": end, "max_position_embeddings": LONGEST}
    text["tie_word_embeddings"] = tied
    if own is None:
        write_image_settings(directory, family, vision["patch_size"], None, LARGEST_IMAGE)
        parts = {"vision_config": dict(vision), **media_token_ids(tokenizer)}
    else:
        own.write_settings(directory, **square)
        parts = own.make_config(tokenizer, text, vision["hidden_size"], vision["num_hidden_layers"], **square)
        parts["vision_config"] |= vision
    config = AutoConfig.for_model(family, **{"text_config": text, **parts, "tie_word_embeddings": tied})
    config.save_pretrained(directory)
    return directory


def draw_model(directory: Path, device: str, dtype: str, seed: int) -> Any:
    """The model of a config.json with random weights, drawn on the device in their dtype."""
    config = load_model_config(str(directory))
    torch.manual_seed(seed)
    with LOADING, torch.device(device):
        model = find_model_class(config).from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    own: Any = OWN_PARTS.get(config.model_type)
    if hasattr(own, "fill_weights"):
        own.fill_weights(model)
    return model
