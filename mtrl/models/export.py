"""A trained model on its way to everybody else: adapters merged, another dtype, files that any tool loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from mtrl.models.families import VISION_FAMILIES, encoder_files, load_encoder, load_model_config
from mtrl.models.files import read_json_object
from mtrl.models.load import DTYPES, load_model
from mtrl.models.weights import exported_weights, save_model

ADAPTER = "adapter_config.json"  # its presence makes a folder one of peft's adapters
SHARD = "5GB"  # the largest file of weights, as hubs like it


def load_merged(path: Path, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a checkpoint in a dtype; of an adapter, its base with the adapter merged. They are merged in float32
    and rounded once: most of a small difference would be lost in the rounding of weights in bf16."""
    if not is_adapter(path):
        return load_model(path, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"{path} is an adapter, and merging it needs peft: pip install peft") from error
    base: Any = load_model(base_path(path), dtype="fp32", trust_remote_code=trust_remote_code)
    merged: Any = PeftModel.from_pretrained(base, str(path)).merge_and_unload()
    return merged.to(DTYPES[dtype]).eval()


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER).exists()


def base_path(path: Path) -> str:
    """The base of an adapter, a path or a hub id."""
    base = read_json_object(path / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{path / ADAPTER} does not name the model that it was trained on (base_model_name_or_path)")
    return base


def own_dtype(path: Path, trust_remote_code: bool = False) -> str:
    """The dtype that a checkpoint is in by its config.json, that of the base for an adapter."""
    place = base_path(path) if is_adapter(path) else str(path)
    found = load_model_config(place, trust_remote_code).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == found), "fp32")


def files_beside(path: Path, chat_template: str | None, trust_remote_code: bool = False) -> Mapping[str, bytes]:
    """The files of tokenizer and processors of a checkpoint. A chat template that the run gave stands in for the
    model's own: the model has learnt to answer to it."""
    place = base_path(path) if is_adapter(path) else str(path)
    spoken = path if (path / "tokenizer_config.json").exists() else place
    encoder = load_encoder(
        place, tokenizer_path=spoken, chat_template=chat_template, trust_remote_code=trust_remote_code
    )
    if chat_template is None:
        return encoder_files(encoder, place)
    encoder.tokenizer.chat_template = encoder.chat_template
    return {name: text for name, text in encoder_files(encoder, place).items() if name != "chat_template.json"}


def sees_images(model: PreTrainedModel) -> bool:
    return model.config.model_type in VISION_FAMILIES


def size_on_disk(model: PreTrainedModel) -> int:
    """Bytes of the weights, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def write_model(model: PreTrainedModel, directory: Path) -> None:
    """Weights, settings and generation settings; a bar shows how far it is, where there is a terminal."""
    try:
        save_model(model, exported_weights(model), directory, shard=SHARD, progress=True)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from error
