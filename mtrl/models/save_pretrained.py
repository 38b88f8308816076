"""A trained model on its way to everybody else: another dtype, files that any tool loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from mtrl.models.adapters import base_path
from mtrl.models.families import VISION_FAMILIES, encoder_files, load_encoder, load_model_config
from mtrl.models.load_model import DTYPES
from mtrl.models.state_dicts import exported_weights, save_model

SHARD = "5GB"  # the largest file of weights, as hubs like it


def own_dtype(path: Path, trust_remote_code: bool = False) -> str:
    """The dtype that a checkpoint is in by its config.json, that of the base for an adapter."""
    found = load_model_config(str(path), trust_remote_code).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == found), "fp32")


def files_beside(path: Path, chat_template: str | None, trust_remote_code: bool = False) -> Mapping[str, bytes]:
    """The files of tokenizer and processors of a checkpoint. A chat template that the run gave stands in for the
    model's own: the model has learnt to answer to it."""
    place = base_path(path)
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
