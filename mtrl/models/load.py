"""A model from a directory or a hub id, its weights to a directory, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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


def save_model(model: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """A checkpoint that `from_pretrained` loads as it is: the model's settings, and `weights`, a state dict of it that
    may be older than what the model holds now."""
    disable_progress_bar()  # a bar for the shards would run through the progress of the training
    model.save_pretrained(directory, state_dict=dict(weights))


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Takes over, in place, what `save_model` wrote of the same model; anything missing or left over is an error."""
    family: Any = type(model)
    try:
        saved, found = family.from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
        if wrong := {problem: sorted(map(str, names)) for problem, names in found.items() if names}:
            raise ValueError(str(wrong))
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds another model than this run's: {error}") from error
