"""What the layers of a language model consist of, read from its modules: the step runs what these records say.

Images (three-dimensional positions, deepstack) matter only while the prompt is read, by the trainer's own modules. A
projection may have a LoRA adapter of the peft library. Such layers are recognized by their attributes, so peft need not
be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from mtrl.models.layer_kinds import RECURRENT, layer_kinds, make_mask_rules

MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = {  # the projections of each block
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "linear_attn": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "mlp": MLP,
    "mlp.shared_expert": MLP,
    "mlp.shared_experts": MLP,
}
FUSED = "gate_up_proj"  # instead of the first two of an MLP


@dataclass(frozen=True)
class Attention:
    """Grouped queries over the keys and values of earlier tokens."""

    heads: int
    key_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    rotary: int  # the first numbers of a head, which are rotated
    positions: str = ""  # the kind of layers whose rotary positions it has
    interleaved: bool = False  # neighbours are rotated together, not a number of each half
    gated: bool = False  # a head's output is multiplied by the sigmoid of numbers that are projected with its queries
    window: int | None = None  # the last tokens that it sees, the own one among them; None: all

    @property
    def share(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.key_heads

    @property
    def query_dim(self) -> int:
        """Numbers of a head's queries and gates."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return self.heads * self.query_dim + 2 * self.key_heads * self.head_dim

    @property
    def out(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Recurrence:
    """A gated delta net (`models/delta_rule.py`): a convolution of the last four tokens, then a state for each head."""

    key_heads: int  # of queries, too
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Numbers of a token's queries, keys and values, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def projected(self) -> int:
        """These, the output's gates, and learning rate and decay of each head."""
        return self.mixed + self.values + 2 * self.value_heads


@dataclass(frozen=True)
class Mlp:
    """activation(gate) * up, and the product back."""

    inner: int
    activation: str = "silu"  # or "gelu_tanh"


@dataclass(frozen=True)
class Mixture:
    """MLPs of which a router chooses some for each token."""

    experts: int
    chosen: int
    inner: int
    shared: int  # width of the expert that every token has; 0: none
    activation: str = "silu"
    sigmoid: bool = False  # the router scores each expert alone, in float32, and a correction is added for the choice
    scale: float = 1.0  # of the weights of chosen experts, whose sum is 1 before


@dataclass(frozen=True)
class Layer:
    """Two blocks that add to the residual: one that reads other tokens, one that does not. Norms come before each, and
    in some models after each, too."""

    mixer: Attention | Recurrence
    mlp: Mlp | Mixture


@dataclass(frozen=True)
class Norm:
    """How the model computes its RMS norms."""

    eps: float
    one_plus: bool = False  # multiplies by 1 + weight, and rounds only after that


@dataclass(frozen=True)
class Shape:
    """The description of a model."""

    hidden: int
    vocabulary: int
    norm: Norm
    layers: tuple[Layer, ...]

    @property
    def attentions(self) -> dict[int, Attention]:
        """By the number of the layer."""
        return {i: layer.mixer for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def mixtures(self) -> dict[int, Mixture]:
        return {i: layer.mlp for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Mixture)}

    @property
    def recurrences(self) -> dict[int, Recurrence]:
        return {i: layer.mixer for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Recurrence)}


# By the names of transformers: those that the kernels have.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ONE_PLUS = ("gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")  # models whose norms multiply by 1 + weight
INTERLEAVED = ("glm4v_text",)  # models whose rotary positions rotate neighbours


def decoder_shape(language_model: Any) -> Shape:
    config = language_model.config
    activation = ACTIVATIONS[activation_name(config)]
    return Shape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        norm=Norm(config.rms_norm_eps, one_plus=config.model_type in ONE_PLUS),
        layers=tuple(
            Layer(_read_mixer(language_model, layer, kind), _read_mlp(layer.mlp, activation))
            # An estimate of memory cuts layers off.
            for layer, kind in zip(language_model.layers, layer_kinds(config), strict=False)
        ),
    )


def _read_mixer(language_model: Any, layer: Any, kind: str) -> Attention | Recurrence:
    if kind == RECURRENT:
        module = layer.linear_attn
        return Recurrence(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    module, rules = layer.self_attn, make_mask_rules(language_model.config, image_blocks=())
    outputs, head_dim = base_layer(module.o_proj).in_features, module.head_dim
    return Attention(
        heads=outputs // head_dim,
        key_heads=_out_features(module.k_proj) // head_dim,
        head_dim=head_dim,
        scale=module.scaling,
        rotary=2 * len(rotary_frequencies(language_model, kind)[0]),
        positions=kind,
        interleaved=language_model.config.model_type in INTERLEAVED,
        gated=_out_features(module.q_proj) == 2 * outputs,
        window=rules[kind].window,
    )


def activation_name(config: Any) -> str:
    """The name of transformers, under either key."""
    return getattr(config, "hidden_act", None) or config.hidden_activation


def rotary_frequencies(language_model: Any, kind: str) -> tuple[Tensor, float]:
    """The frequencies of a head's pairs, and the factor of cos and sin, in layers of a kind: a model has the same for
    all, or some for each."""
    rotary = language_model.rotary_emb
    prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq")
    return frequencies.float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


class LayerNorms(NamedTuple):
    """The norms of a layer; those after its blocks are None in most models."""

    mixer: Any
    after_mixer: Any
    mlp: Any
    after_mlp: Any


def layer_norms(layer: Any) -> LayerNorms:
    """`post_attention_layernorm` is the norm before the MLP, or in Gemma that after attention."""
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    if hasattr(layer, "post_feedforward_layernorm"):
        return LayerNorms(first, second, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm)
    after_mixer, after_mlp = (getattr(layer, f"post_{block}_layernorm", None) for block in ("self_attn", "mlp"))
    return LayerNorms(first, after_mixer, second, after_mlp)


def _read_mlp(module: Any, activation: str) -> Mlp | Mixture:
    if not has_experts(module):
        return Mlp(_inner_width(module), activation)
    experts, _, inner = module.experts.down_proj.shape
    shared, router = shared_expert(module), module.gate
    return Mixture(
        experts,
        router.top_k,
        inner,
        shared=0 if shared is None else _inner_width(shared),
        activation=activation,
        sigmoid=router_correction(router) is not None,
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
    )


def gate_and_up(mlp: Any) -> list[Any]:
    """The projections of an MLP's input: one of each, or one of both."""
    return [mlp.gate_up_proj] if hasattr(mlp, FUSED) else [mlp.gate_proj, mlp.up_proj]


def _inner_width(mlp: Any) -> int:
    return sum(map(_out_features, gate_and_up(mlp))) // 2


def shared_expert(mlp: Any) -> Any:
    """The MLP that every token has in a mixture of experts; None if there is none."""
    return getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))


def router_correction(router: Any) -> Tensor | None:
    """What a router adds to the scores of experts to choose some of them; None if it chooses by a softmax."""
    return getattr(router, "e_score_correction_bias", None)


def has_experts(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


def _out_features(linear: Any) -> int:
    return base_layer(linear).out_features


# --------------------------------------------------------------------------------------------------------- projections
class Adapter(NamedTuple):
    """x @ weight.T becomes x @ weight.T + scaling * (x @ low.T) @ up.T"""

    low: nn.Parameter  # [rank, in]
    up: nn.Parameter  # [out, rank]
    scaling: float


def projections(layer: Any) -> Iterator[tuple[str, Any]]:
    """The names and modules of a layer's linear projections; None for one that is missing. Experts are tensors."""
    for block, names in LINEAR.items():
        module = layer
        for part in block.split("."):
            module = getattr(module, part, None)
        if module is not None and not has_experts(module):
            present = (FUSED, names[-1]) if hasattr(module, FUSED) else names
            yield from ((name, getattr(module, name, None)) for name in present)


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
