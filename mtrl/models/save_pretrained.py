"""Export a trained model: in another dtype, as files that any tool loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from mtrl.models.checkpoint_files import base_path, convert_disk_errors
from mtrl.models.families import encoder_files, load_encoder, load_model_config
from mtrl.models.load_model import DTYPES
from mtrl.models.state_dicts import exported_weights, save_model

MAX_SHARD_SIZE = "5GB"  # the largest file of weights, as usual on hubs


def read_dtype(path: Path, trust_remote_code: bool = False) -> str:
    """The dtype in a checkpoint's config.json; for an adapter that of its base."""
    stored = load_model_config(str(path), trust_remote_code).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


def read_encoder_files(path: Path, chat_template: str | None, trust_remote_code: bool = False) -> Mapping[str, bytes]:
    """The tokenizer and processor files of a checkpoint. The run's chat template replaces the model's: the model was
    trained on it."""
    base = base_path(path)
    tokenizer_path = path if (path / "tokenizer_config.json").exists() else base
    encoder = load_encoder(
        base, tokenizer_path=tokenizer_path, chat_template=chat_template, trust_remote_code=trust_remote_code
    )
    if chat_template is None:
        return encoder_files(encoder, base)
    encoder.tokenizer.chat_template = encoder.chat_template
    return {name: text for name, text in encoder_files(encoder, base).items() if name != "chat_template.json"}


def size_on_disk(model: PreTrainedModel) -> int:
    """Bytes of the weights, tied weights once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def write_model(model: PreTrainedModel, directory: Path) -> None:
    """Write weights, config and generation config, with a progress bar in a terminal."""
    with convert_disk_errors():
        save_model(model, exported_weights(model), directory, shard=MAX_SHARD_SIZE, progress=True)
