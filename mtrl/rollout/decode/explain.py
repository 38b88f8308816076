"""Why the engine does not decode a model: it would compute it wrongly."""

from __future__ import annotations

from typing import Any

from torch import nn

from mtrl.models.layer_kinds import RECURRENT, layer_kinds
from mtrl.models.model_size import head_widths
from mtrl.rollout.decode.layers import (
    ACTIVATIONS,
    LINEAR,
    activation_name,
    base_layer,
    has_experts,
    projections,
)

# By the `model_type` of the language model's config: those whose code in transformers was read and computes what
# `layers.py` can say, and nothing more. Modules alone do not tell: a factor on the residual is no module.
READ = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "llama", "mistral", "gemma3_text",
        "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text")  # fmt: skip
FAR = {  # read, too, and what they have is no kind of `layers.py`
    "gemma4_text": "norms of values, keys that are values or those of earlier layers, embeddings for every layer, a "
    "factor on each layer's output, and a cap of the logits",
}
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # their frequencies do not depend on the length


def explain_unsupported(language_model: Any, head: nn.Module) -> str | None:
    """Why the kernels would compute this model wrongly; None if they are right. `head`: its output layer."""
    config = language_model.config
    if config.model_type not in READ:
        has = f": they have {FAR[config.model_type]}" if config.model_type in FAR else ""
        return f"the layers of the family {config.model_type!r} are not supported{has}"
    widths = [*head_widths(config)]
    if RECURRENT in layer_kinds(config):
        widths += [config.linear_key_head_dim, config.linear_value_head_dim]
    for width in widths:
        if width < 16 or width & (width - 1):
            return f"heads of {width} numbers: the kernels take powers of two from 16"
    if (activation := activation_name(config)) not in ACTIVATIONS:
        return f"an MLP with {activation}"
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in parameters.values() if isinstance(each, dict)]
    for rotary in [each.get("rope_type", "default") for each in by_kind or [parameters]]:
        if rotary not in FIXED_ROPE:
            return f"rotary positions of the kind {rotary!r}"
    embedding = language_model.embed_tokens
    for name, module, kind in (("embedding", embedding, nn.Embedding), ("head", head, nn.Linear)):
        if type(module) is not kind and not hasattr(module, "embed_scale"):
            return f"the {name} is a {_kind(module)}"
    return next((why for layer in language_model.layers if (why := _explain_layer(layer))), None)


def _explain_layer(layer: Any) -> str | None:
    for name, linear in projections(layer):
        base = base_layer(linear)
        if type(base) is not nn.Linear:  # a quantized weight computes something else
            return f"{name} is a {_kind(base)}"
        if base is not linear and (why := _explain_adapter(linear)):
            return f"the adapter of {name} {why}"
    biased = {name for name, linear in projections(layer) if base_layer(linear).bias is not None}
    fused = {*LINEAR["self_attn"][:3]}
    if biased - fused or biased & fused not in (set(), fused):
        return f"the bias of {min(biased - fused or fused - biased)}"
    if has_experts(layer.mlp) and (why := _explain_experts(layer.mlp)):
        return why
    return _explain_head_norms(layer.self_attn) if hasattr(layer, "self_attn") else None


def _explain_experts(mlp: Any) -> str | None:
    parts = [getattr(mlp.experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(part, nn.Parameter) for part in parts) or hasattr(mlp.experts, "base_layer"):
        return f"the experts are a {_kind(mlp.experts)}: one tensor for all is supported, without adapters"
    if getattr(mlp.gate, "num_group", 1) > 1:
        return "a router that chooses groups of experts first"
    if not getattr(mlp.gate, "norm_topk_prob", True):
        return "weights of experts that are not divided by their sum"
    gate = getattr(mlp, "shared_expert_gate", None)
    if gate is not None and type(gate) is not nn.Linear:
        return f"the gate of the shared expert is a {_kind(gate)}"
    return None


def _explain_head_norms(attention: Any) -> str | None:
    """Queries and keys have both a norm over the numbers of a head, or neither has one."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    widths = {None if norm is None else getattr(norm, "weight", nn.Parameter()).numel() for norm in norms}
    return None if widths in ({None}, {attention.head_dim}) else "the norms of queries and keys"


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
