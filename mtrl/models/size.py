"""How large a model is, from its config.json alone: the weights are never read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from mtrl.models.families import VISION_FAMILIES, load_model_config


@dataclass(frozen=True)
class LayerSize:
    """What one layer of a stack keeps for each of its tokens."""

    layers: int
    hidden: int
    inner: int  # of the feed-forward part
    keys: int  # and as many values
    head: int  # of which a head has so many


@dataclass(frozen=True)
class ModelSize:
    parameters: int
    vision_parameters: int
    vocabulary: int
    text: LayerSize
    vision: LayerSize | None
    patch: int = 1  # pixels a side
    merge: int = 1  # patches a side of a token
    patch_numbers: int = 0  # that the tower takes of a patch
    mlp_parameters: int = 0  # of the language model's feed-forward parts
    matrices: int = 0
    tied: bool = True  # the output matrix is the embeddings'


def size_of(path: str, trust_remote_code: bool = False) -> ModelSize:
    return size_by(load_model_config(path, trust_remote_code), trust_remote_code)


def judge_parameters(path: str, trust_remote_code: bool = False) -> int:
    """Of a reward model."""
    config = load_model_config(path, trust_remote_code)
    family: Any = AutoModelForSequenceClassification
    if config.model_type in VISION_FAMILIES:
        family = AutoModelForImageTextToText
    with torch.device("meta"):
        return _count(family.from_config(config, trust_remote_code=trust_remote_code))


def size_by(config: Any, trust_remote_code: bool = False) -> ModelSize:
    """Builds the model without memory (the meta device) and counts."""
    seeing = config.model_type in VISION_FAMILIES
    family: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    head = head_width(text)
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    tower = getattr(model.model, "visual", None) if seeing else None
    language_model = getattr(model.model, "language_model", model.model)
    output = model.get_output_embeddings().weight
    return ModelSize(
        parameters=_count(model),
        vision_parameters=0 if tower is None else _count(tower),
        vocabulary=output.shape[0],
        text=LayerSize(text.num_hidden_layers, text.hidden_size, inner, head * key_heads, head),
        vision=_tower_size(config.vision_config) if seeing else None,
        patch=config.vision_config.patch_size if seeing else 1,
        merge=config.vision_config.spatial_merge_size if seeing else 1,
        patch_numbers=0 if tower is None else tower.patch_embed.proj.weight[0].numel(),
        mlp_parameters=sum(_count(m) for m in language_model.modules() if type(m).__name__.lower().endswith("mlp")),
        matrices=sum(parameter.dim() > 1 for parameter in model.parameters()),
        tied=output is model.get_input_embeddings().weight,
    )


def head_width(text: Any) -> int:
    """Of a language model's settings, where not all name it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _tower_size(vision: Any) -> LayerSize:
    """Qwen2-VL calls the width of its tower embed_dim, and hidden_size what comes out of it."""
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    return LayerSize(vision.depth, width, inner, width, width // vision.num_heads)


def _count(module: torch.nn.Module) -> int:
    """Tied weights once."""
    return sum(parameter.numel() for parameter in module.parameters())
