"""A head of one number in place of the output matrix: for a critic, and for a vision-language reward model.

On disk such a model is a checkpoint of its family with `score.weight` [1, hidden] in its safetensors and no output
matrix (the layout of `AutoModelForSequenceClassification`, and for vision-language families that of ms-swift). So a
critic may start from a reward model, and a trained critic is a checkpoint like others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from mtrl.models.load_model import empty_model, load_model

HEAD = "score.weight"
OUTPUT_MATRIX = "lm_head.weight"  # in every supported family


class ValueHead(nn.Linear):
    """Replaces the output matrix, which then takes no memory."""


def load_value_model(path: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model with the value head of its checkpoint, or with a head of zeros. `options` are those of
    `load_model`."""
    model: Any = load_model(path, optional=(HEAD, OUTPUT_MATRIX), **options)
    width, head = model.get_output_embeddings().in_features, find_head(str(path))
    if head is not None and head.shape != (1, width):
        raise ValueError(f"{path}: its {HEAD} is {list(head.shape)}; a value is one number, so it must be [1, {width}]")
    return attach_head(model, torch.zeros(1, width) if head is None else head)


def attach_head(model: PreTrainedModel, head: Tensor) -> PreTrainedModel:
    """Replace the model's output matrix by the head."""
    score = ValueHead(head.shape[1], 1, bias=False, device=model.device, dtype=model.dtype)
    score.weight.data.copy_(head)
    model.set_output_embeddings(score)
    return model


def empty_value_model(path: str | Path, **options: Any) -> PreTrainedModel:
    """The model of `load_value_model` on the meta device; `options` are those of `empty_model`."""
    model: Any = empty_model(path, **options)
    return attach_head(model, torch.empty(1, model.get_output_embeddings().in_features, device="meta"))


def has_head(model: PreTrainedModel) -> bool:
    return isinstance(getattr(model, "lm_head", None), ValueHead)


def find_head(path: str) -> Tensor | None:
    """The head in the safetensors of a local or hub checkpoint, if any."""
    index = _find_file(path, "model.safetensors.index.json")
    shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"] if index else {}
    file = _find_file(path, shards.get(HEAD, "model.safetensors"))
    if file is None:
        return None
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(HEAD) if HEAD in tensors.keys() else None  # noqa: SIM118


def _find_file(path: str, name: str) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)
