"""The size of a model from its config.json: the weights are never read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from mtrl.models.families import VISION_FAMILIES, find_family, load_model_config
from mtrl.models.layer_kinds import attention_layers
from mtrl.models.load_model import build_empty
from mtrl.models.recurrent import count_states


@dataclass(frozen=True)
class ModelSize:
    tensors: tuple[int, ...]  # size of each weight, tied weights once
    learning: tuple[int, ...]  # the same for trainable weights
    vocabulary: int
    output: int  # parameters of the output matrix
    layers: int  # in the language model, that have keys of their own
    keys: int  # numbers per layer and token in the cache of keys, in the widest layer; as many values
    read: int  # parameters of the language model, embeddings included
    state: int = 0  # numbers per row in the states of all recurrent layers

    @property
    def frozen(self) -> tuple[int, ...]:
        """The size of each frozen weight."""
        return tuple((Counter(self.tensors) - Counter(self.learning)).elements())

    @property
    def parameters(self) -> int:
        return sum(self.tensors)


def model_size(model: Any) -> ModelSize:
    """The size of a causal language model, with weights or without."""
    text = model.config.get_text_config()
    cached = layers_with_keys(text)
    output = model.get_output_embeddings().weight
    return ModelSize(
        tensors=tuple(parameter.numel() for parameter in model.parameters()),
        learning=tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        vocabulary=output.shape[0],
        output=output.numel(),
        layers=len(cached),
        keys=max(_count_keys(text.per_layer_config[layer]) for layer in cached),
        read=_count(find_family(model.config).find_language_model(model)),
        state=count_states(text),
    )


def critic_tensors(model: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The size of each weight, and of each trainable one, with a value head in place of the output matrix. A matrix
    that is tied to the input embedding stays."""
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    weights = [each for each in model.parameters() if each is not output or each is embedding]
    head = output.shape[1]
    learning = (each.numel() for each in weights if each.requires_grad)
    return (*(each.numel() for each in weights), head), (*learning, head)


def reward_model_parameters(path: str, trust_remote_code: bool = False) -> int:
    config = load_model_config(path, trust_remote_code)
    has_vision = config.model_type in VISION_FAMILIES
    family: Any = AutoModelForImageTextToText if has_vision else AutoModelForSequenceClassification
    return _count(build_empty(family, config, trust_remote_code=trust_remote_code))


def layers_with_keys(text: Any) -> list[int]:
    """The layers with attention that do not read the keys of an earlier one, from a language model's config."""
    last = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    return [layer for layer in attention_layers(text) if layer < last]


def head_widths(text: Any) -> set[int]:
    """Widths of the attention heads of all layers, from a language model's config, which may not name them."""
    return {_head_width(layer) for layer in text.per_layer_config}


def _head_width(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _count_keys(layer: Any) -> int:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return heads * _head_width(layer)


def _count(module: torch.nn.Module) -> int:
    """Parameters of a module, tied weights once."""
    return sum(parameter.numel() for parameter in module.parameters())
