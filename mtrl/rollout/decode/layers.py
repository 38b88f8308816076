"""The decoder layers that the engine supports, and why it does not support others.

All supported families have the same layer: RMS norms before attention and MLP, separate projections of queries, keys
and values, rotary positions over halves of a head, a gated MLP with SiLU. They differ in the bias of those projections
and in norms of queries and keys. Images (three-dimensional positions, deepstack) matter only while the prompt is read,
by the trainer's own modules. A new family with such a layer is one more line.

A projection may have a LoRA adapter of the peft library. Such layers are recognized by their attributes, so peft need
not be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn


@dataclass(frozen=True)
class LayerTraits:
    has_bias: bool = False  # in the projections of queries, keys and values
    has_norms: bool = False  # queries and keys are normalized, head by head


SUPPORTED = {  # by the `model_type` of the language model's config
    "qwen2": LayerTraits(has_bias=True),
    "qwen2_vl_text": LayerTraits(has_bias=True),
    "qwen2_5_vl_text": LayerTraits(has_bias=True),
    "qwen3": LayerTraits(has_norms=True),
    "qwen3_vl_text": LayerTraits(has_norms=True),
    "llama": LayerTraits(),
    "mistral": LayerTraits(),
}
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # their frequencies do not depend on the length
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int  # width of the MLP
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    eps: float

    @property
    def share(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.key_heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.key_heads) * self.head_dim


def decoder_shape(language_model: Any) -> Shape:
    config = language_model.config
    return Shape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
    )


class Adapter(NamedTuple):
    """x @ weight.T becomes x @ weight.T + scaling * (x @ low.T) @ up.T"""

    low: nn.Parameter  # [rank, in]
    up: nn.Parameter  # [out, rank]
    scaling: float


def projections(layer: Any) -> list[Any]:
    modules = zip((layer.self_attn, layer.mlp), LINEAR, strict=True)
    return [getattr(module, name) for module, names in modules for name in names]


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


def explain_unsupported(language_model: Any, head: nn.Module) -> str | None:
    """Why the kernels would compute this model wrongly; None if they are right. `head`: its output layer."""
    config = language_model.config
    traits = SUPPORTED.get(config.model_type)
    if traits is None:
        return f"the layers of the family {config.model_type!r} are not supported"
    head_dim = decoder_shape(language_model).head_dim
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"heads of {head_dim} numbers: the kernels take powers of two from 16"
    if config.hidden_act != "silu":
        return f"an MLP with {config.hidden_act}"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in FIXED_ROPE:
        return f"rotary positions of the kind {rotary!r}"
    for name, module, kind in (("embedding", language_model.embed_tokens, nn.Embedding), ("head", head, nn.Linear)):
        if type(module) is not kind:
            return f"the {name} is a {_kind(module)}"
    return next((why for layer in language_model.layers if (why := _explain_layer(layer, traits))), None)


def _explain_layer(layer: Any, traits: LayerTraits) -> str | None:
    for module, names in zip((layer.self_attn, layer.mlp), LINEAR, strict=True):
        for name in names:
            linear = getattr(module, name, None)
            base = base_layer(linear)
            if type(base) is not nn.Linear:  # a quantized weight computes something else
                return f"{name} is a {_kind(base)}"
            if (base.bias is not None) != (traits.has_bias and name in LINEAR[0][:3]):
                return f"the bias of {name}"
            if base is not linear and (why := _explain_adapter(linear)):
                return f"the adapter of {name} {why}"
    if hasattr(layer.self_attn, "q_norm") != traits.has_norms:
        return "the norms of queries and keys"
    return None


def _explain_adapter(linear: Any) -> str | None:
    parts = getattr(linear, "lora_A", None), getattr(linear, "lora_B", None)
    if not all(isinstance(part, nn.ModuleDict) for part in parts):
        return f"is a {_kind(linear)}, not LoRA"
    if linear.merged:
        return "is merged into its weight: unmerge it"
    active = [name for name in linear.active_adapters if name in linear.lora_A]
    if len(active) > 1:
        return f"is one of several ({', '.join(active)}): make one of them active"
    for name in active:
        if name in linear.lora_variant:
            return f"is a {_kind(linear.lora_variant[name])}, not plain LoRA"
        for part in (linear.lora_A[name], linear.lora_B[name]):
            if type(part) is not nn.Linear:
                return f"holds a {_kind(part)}"
            if part.bias is not None:
                return "has a bias"
    return None


def _kind(module: Any) -> str:
    """The class name, with its package if that is not torch: libraries that replace layers reuse torch's names."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("torch", "builtins") else f"{package} {kind.__name__}"
