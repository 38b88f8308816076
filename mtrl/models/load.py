"""A model from a directory or a hub id."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mtrl.models.families import VISION_FAMILIES, load_model_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    path: str | Path,
    *,
    dtype: str = "fp32",
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal model of a supported family, in evaluation mode. `attn_implementation: auto` is sdpa."""
    path = str(path)
    config = load_model_config(path, trust_remote_code)
    if not sys.stderr.isatty():
        disable_progress_bar()
    family: Any = AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM
    model: Any = family.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[dtype],
        attn_implementation="sdpa" if attn_implementation == "auto" else attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    return model.to(device).eval()
