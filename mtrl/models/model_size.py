"""How large a model is, from its config.json alone: the weights are never read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from mtrl.models.families import VISION_FAMILIES, load_model_config


@dataclass(frozen=True)
class ModelSize:
    tensors: tuple[int, ...]  # numbers in each weight, tied ones once
    learning: tuple[int, ...]  # the same of those that learn
    vocabulary: int
    output: int  # numbers of the output matrix
    layers: int  # of the language model
    keys: int  # numbers that a layer keeps of a token, and as many values
    read: int  # parameters of the language model, embeddings included

    @property
    def frozen(self) -> tuple[int, ...]:
        """The tensors that do not learn."""
        return tuple((Counter(self.tensors) - Counter(self.learning)).elements())

    @property
    def parameters(self) -> int:
        return sum(self.tensors)


def model_size(model: Any) -> ModelSize:
    """Of a causal language model, with weights or without."""
    text = model.config.get_text_config()
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    output = model.get_output_embeddings().weight
    return ModelSize(
        tensors=tuple(parameter.numel() for parameter in model.parameters()),
        learning=tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        vocabulary=output.shape[0],
        output=output.numel(),
        layers=text.num_hidden_layers,
        keys=head_width(text) * key_heads,
        read=_count(getattr(model.model, "language_model", model.model)),
    )


def critic_tensors(model: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers in each weight of such a model with a value head in place of its output matrix, and in those that learn.
    A matrix that is the input's too stays."""
    output, stays = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    kept = [each for each in model.parameters() if each is not output or each is stays]
    head = output.shape[1]
    learning = (each.numel() for each in kept if each.requires_grad)
    return (*(each.numel() for each in kept), head), (*learning, head)


def reward_model_parameters(path: str, trust_remote_code: bool = False) -> int:
    config = load_model_config(path, trust_remote_code)
    family: Any = AutoModelForSequenceClassification
    if config.model_type in VISION_FAMILIES:
        family = AutoModelForImageTextToText
    with torch.device("meta"):
        return _count(family.from_config(config, trust_remote_code=trust_remote_code))


def head_width(text: Any) -> int:
    """Of a language model's settings, where not all name it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _count(module: torch.nn.Module) -> int:
    """Tied weights once."""
    return sum(parameter.numel() for parameter in module.parameters())
