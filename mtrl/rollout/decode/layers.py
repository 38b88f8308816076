"""What the layers of a language model consist of, read from its modules: the step runs what these records say.

Images (three-dimensional positions, deepstack) matter only while the prompt is read, by the trainer's own modules. A
projection may have a LoRA adapter of the peft library. Such layers are recognized by their attributes, so peft need not
be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import nn

LINEAR = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class Attention:
    """Grouped queries over the keys and values of all earlier tokens."""

    heads: int
    key_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys

    @property
    def share(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.key_heads

    @property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.key_heads) * self.head_dim

    @property
    def out(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Mlp:
    """activation(gate) * up, and the product back."""

    inner: int


@dataclass(frozen=True)
class Layer:
    """Two blocks that add to the residual: one that reads other tokens, one that does not."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True)
class Norm:
    """How the model computes its RMS norms."""

    eps: float


@dataclass(frozen=True)
class Shape:
    """The description of a model."""

    hidden: int
    vocabulary: int
    norm: Norm
    layers: tuple[Layer, ...]


class Kind(StrEnum):
    """What a layer may consist of."""

    GROUPED_QUERIES = "attention of grouped queries"
    BIASES = "biases of queries, keys and values"
    HEAD_NORMS = "norms of queries and keys"
    SILU = "MLPs with silu"


def decoder_shape(language_model: Any) -> Shape:
    config = language_model.config
    return Shape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        norm=Norm(config.rms_norm_eps),
        layers=tuple(_read_layer(layer) for layer in language_model.layers),
    )


def _read_layer(layer: Any) -> Layer:
    return Layer(_read_attention(layer.self_attn), Mlp(_out_features(layer.mlp.gate_proj)))


def _read_attention(module: Any) -> Attention:
    head_dim = module.head_dim
    return Attention(
        heads=_out_features(module.q_proj) // head_dim,
        key_heads=_out_features(module.k_proj) // head_dim,
        head_dim=head_dim,
        scale=module.scaling,
    )


def _out_features(linear: Any) -> int:
    return base_layer(linear).out_features


def used_kinds(language_model: Any) -> set[Kind]:
    """All that the layers of a supported model consist of."""
    kinds = {Kind.GROUPED_QUERIES, Kind.SILU}
    for layer in language_model.layers:
        if base_layer(layer.self_attn.q_proj).bias is not None:
            kinds.add(Kind.BIASES)
        if hasattr(layer.self_attn, "q_norm"):
            kinds.add(Kind.HEAD_NORMS)
    return kinds


# --------------------------------------------------------------------------------------------------------- projections
class Adapter(NamedTuple):
    """x @ weight.T becomes x @ weight.T + scaling * (x @ low.T) @ up.T"""

    low: nn.Parameter  # [rank, in]
    up: nn.Parameter  # [out, rank]
    scaling: float


def projections(layer: Any) -> Iterator[tuple[str, Any]]:
    """The names and modules of a layer's linear projections; None for one that is missing."""
    for block, names in LINEAR.items():
        for name in names:
            yield name, getattr(getattr(layer, block), name, None)


def base_layer(linear: Any) -> Any:
    """The projection itself, without its adapter."""
    return getattr(linear, "base_layer", linear)


def lora_adapters(linear: Any) -> list[Adapter]:
    """The active adapters of a projection: none if they are switched off or merged into the weight."""
    if not hasattr(linear, "base_layer") or linear.disable_adapters or linear.merged:
        return []
    return [
        Adapter(linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])
        for name in linear.active_adapters
        if name in linear.lora_A
    ]
