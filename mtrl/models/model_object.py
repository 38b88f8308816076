"""A transformers model that a script passes as an object: checked, written as a checkpoint, made ready for training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mtrl.models.adapters import has_adapters
from mtrl.models.families import check_known_family, save_processor
from mtrl.models.load_model import DTYPES
from mtrl.models.masked_attention import ATTENTION
from mtrl.models.state_dicts import exported_weights, save_model

ADVICE = "save it (save_pretrained) and pass the folder"

logger = logging.getLogger(__name__)


def check_model_object(model: Any) -> None:
    """Raise a TypeError for an object that cannot be trained in place in this process."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        wrapper = getattr(model, "save_pretrained", None) or isinstance(model, torch.nn.Module)
        advice = "; pass the transformers model inside it, or a folder" if wrapper else ""
        raise TypeError(f"model: a hub id, a folder or a transformers model, got {kind}{advice}")
    if not model.can_generate():
        raise TypeError(f"model: a {type(model).__name__} has no output layer; load it with its class for generation")
    if getattr(model, "is_quantized", False):
        raise TypeError(
            "model: its weights are quantized and cannot be trained; load it without, or see peft_type=qlora"
        )
    if has_adapters(model):
        raise TypeError("model: it has adapters; merge them, or pass the name of the base and peft_type=, lora_rank=")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        where = ", ".join(sorted(devices))
        raise TypeError(f"model: its weights are on {where} (device_map); load it on one device, or {ADVICE}")
    try:
        check_known_family(model.config, "model")
    except ValueError as error:
        raise TypeError(str(error)) from error


def write_model_object(model: PreTrainedModel, processing_class: Any, folder: Path) -> None:
    """Write the object and its processor or tokenizer as a checkpoint. Without one, those of the checkpoint that the
    object was loaded from."""
    save_model(model, exported_weights(model), folder)
    save_processor(processing_class, model.name_or_path or "", folder)


def prepare_model_object(model: Any, *, dtype: str, device: str, attn_implementation: str) -> None:
    """Give the object what `load_model` gives a model that it loads, in place."""
    if model.dtype != DTYPES[dtype]:
        message = "model: its weights are converted in place from %s to %s, in which they are trained (param_dtype)"
        logger.warning(message, *(str(each).removeprefix("torch.") for each in (model.dtype, DTYPES[dtype])))
    if frozen := sum(not parameter.requires_grad for parameter in model.parameters()):
        logger.warning("model: %d of its weights are frozen (requires_grad is False) and stay so", frozen)
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()  # the configuration decides
    wanted = "sdpa" if attn_implementation == "auto" else attn_implementation
    if model.config.get_text_config()._attn_implementation not in (wanted, *([ATTENTION] if wanted == "sdpa" else [])):
        model.set_attn_implementation(wanted)
    model.to(device=device, dtype=DTYPES[dtype]).eval()
