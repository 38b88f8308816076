"""The language model's weights for decoding: in the dtype of the products, with projections of the same input fused
into one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtrl.models.families import find_family
from mtrl.rollout.decode.arena import make_arena, round_up
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.layers import (
    base_layer,
    decoder_shape,
    gate_and_up,
    has_experts,
    layer_norms,
    lora_adapters,
    projections,
    rotary_frequencies,
    router_correction,
    shared_expert,
)

ALIGNED = 8  # the rank of adapters is rounded up to it, since products with odd rows are slow


@dataclass(frozen=True)
class LowRank:
    """The adapters of fused projections: x @ matrix.T + (x @ low.T) @ up.T"""

    low: Tensor  # [rank, in], one projection after the other
    up: Tensor  # [out, rank], scaled; each projection in its own rows and columns, zeros elsewhere

    @property
    def rank(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class Projection:
    """Linear projections of the same input, fused, without their biases."""

    weight: Tensor  # [out, in], one projection after the other
    adapter: LowRank | None = None


@dataclass(frozen=True)
class AttentionWeights:
    qkv: Projection
    bias: Tensor | None  # of `qkv`
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Projection


@dataclass(frozen=True)
class RecurrenceWeights:
    projected: Projection  # queries, keys and values; gates; learning rates; decays
    convolution: Tensor  # [channels, 1, 4]
    log_decay: Tensor  # [value heads] in float32, as the model reads them
    decay_bias: Tensor
    norm: Tensor
    out: Projection


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class SharedExpert:
    mlp: MlpWeights
    gate: Tensor | None  # [1, hidden]


@dataclass(frozen=True)
class MixtureWeights:
    router: Projection
    correction: Tensor | None  # [experts] float32
    gate_up: Tensor  # [experts, 2 inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    shared: SharedExpert | None


@dataclass(frozen=True)
class DecodeLayer:
    norm: Tensor
    mixer: AttentionWeights | RecurrenceWeights
    mlp_norm: Tensor
    mlp: MlpWeights | MixtureWeights
    after_mixer: Tensor | None = None  # norms of what the blocks add
    after_mlp: Tensor | None = None


class DecodeWeights:
    """Follows the parameters of `model`; call `refresh` after they have changed.

    A parameter that already has this dtype is not copied: alone it is used as it is, and one of several that are fused
    becomes a view of the fused matrix (the model adopts it). Adapters, which are small, are always copied. Copies are
    in the arena and keep their addresses, so graphs that read them stay valid; only a parameter that was moved in the
    meantime, or another adapter, makes them stale, and `refresh` reports it."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        lm = find_family(model.config).find_language_model(model)
        if why := explain_unsupported(lm, model.get_output_embeddings()):
            raise ValueError(f"this engine cannot decode with the model: {why}")
        self.dtype, self.arena = dtype, make_arena(model.device)
        self.copied: list[tuple[Tensor, Tensor]] = []  # a copy, and its parameter
        self.shared: list[tuple[Tensor, Tensor]] = []
        self.scaled: list[tuple[Tensor, Any]] = []  # a scaled copy, and the projection whose adapter it is
        self.padded: list[Tensor] = []  # tensors that have zeros around their copies
        self._modules = lm.layers
        self._adapters = self._list_adapters()
        self.rank = 0  # the highest of fused adapters
        self.shape = replace(decoder_shape(lm), vocabulary=len(model.get_output_embeddings().weight))
        self.layers = [self._layer(layer) for layer in lm.layers]
        self.norm = self._follow(lm.norm.weight)
        self.embed = self._follow(lm.embed_tokens.weight)
        output = model.get_output_embeddings().weight
        self.head = self.embed if output is lm.embed_tokens.weight else self._follow(output)
        self.embed_scale = find_embed_scale(lm.embed_tokens, dtype)
        self._rotary = {
            kind: rotary_frequencies(lm, kind) for kind in {each.positions for each in self.shape.attentions.values()}
        }
        self.refresh()

    def _layer(self, layer: Any) -> DecodeLayer:
        norms = layer_norms(layer)
        return DecodeLayer(
            norm=self._follow(norms.mixer.weight),
            mixer=self._mixer(layer),
            mlp_norm=self._follow(norms.mlp.weight),
            mlp=self._mixture(layer.mlp) if has_experts(layer.mlp) else self._mlp(layer.mlp),
            after_mixer=None if norms.after_mixer is None else self._follow(norms.after_mixer.weight),
            after_mlp=None if norms.after_mlp is None else self._follow(norms.after_mlp.weight),
        )

    def _mixer(self, layer: Any) -> AttentionWeights | RecurrenceWeights:
        return (
            self._recurrence(layer.linear_attn) if hasattr(layer, "linear_attn") else self._attention(layer.self_attn)
        )

    def _attention(self, module: Any) -> AttentionWeights:
        qkv = module.q_proj, module.k_proj, module.v_proj
        biases = [base_layer(each).bias for each in qkv]
        normed = hasattr(module, "q_norm")
        return AttentionWeights(
            qkv=self._projection(*qkv),
            bias=None if biases[0] is None else self._follow(*biases),
            query_norm=self._follow(module.q_norm.weight) if normed else None,
            key_norm=self._follow(module.k_norm.weight) if normed else None,
            out=self._projection(module.o_proj),
        )

    def _recurrence(self, module: Any) -> RecurrenceWeights:
        return RecurrenceWeights(
            self._projection(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a),
            convolution=self._follow(module.conv1d.weight),
            log_decay=self._follow(module.A_log, dtype=torch.float32),
            decay_bias=self._follow(module.dt_bias, dtype=torch.float32),
            norm=self._follow(module.norm.weight),
            out=self._projection(module.out_proj),
        )

    def _mlp(self, module: Any) -> MlpWeights:
        return MlpWeights(self._projection(*gate_and_up(module)), self._projection(module.down_proj))

    def _mixture(self, module: Any) -> MixtureWeights:
        correction = router_correction(module.gate)
        wide = None if correction is None else torch.float32  # as the model multiplies
        return MixtureWeights(
            router=Projection(self._follow(module.gate.weight, dtype=wide)),
            correction=None if correction is None else self._follow(correction, dtype=wide),
            gate_up=self._follow(module.experts.gate_up_proj),
            down=self._follow(module.experts.down_proj),
            shared=self._shared_expert(module),
        )

    def _shared_expert(self, module: Any) -> SharedExpert | None:
        mlp, gate = shared_expert(module), getattr(module, "shared_expert_gate", None)
        if mlp is None:
            return None
        return SharedExpert(self._mlp(mlp), None if gate is None else self._follow(gate.weight))

    def _projection(self, *linears: Any) -> Projection:
        return Projection(self._follow(*(base_layer(each).weight for each in linears)), self._adapter(*linears))

    def _adapter(self, *linears: Any) -> LowRank | None:
        """The adapters of these fused projections; those without one have rank 0."""
        weights, by_linear = [base_layer(each).weight for each in linears], [lora_adapters(each) for each in linears]
        ranks = [len(each[0].low) if each else 0 for each in by_linear]
        if not any(ranks):
            return None
        rank = round_up(sum(ranks), ALIGNED)
        self.rank = max(self.rank, rank)
        low = self.arena.empty(self.dtype, rank, weights[0].shape[1])
        up = self.arena.empty(self.dtype, sum(map(len, weights)), rank)
        self.padded += [low, up]
        row = column = 0
        for linear, weight, adapters, width in zip(linears, weights, by_linear, ranks, strict=True):
            columns = slice(column, column + width)
            self.copied += [(low[columns], each.low) for each in adapters]
            self.scaled += [(up[row : row + len(weight), columns], linear) for _ in adapters]
            row, column = row + len(weight), column + width
        return LowRank(low, up)

    def _follow(self, *parameters: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor that holds these parameters, one after the other."""
        dtype = dtype or self.dtype
        same = all(each.dtype == dtype for each in parameters)
        if same and (fused := join_adjacent(parameters)) is not None:
            self.shared += [(each.detach(), each) for each in parameters]
            return fused
        first = parameters[0]
        size = (sum(len(each) for each in parameters), *first.shape[1:])
        adopted = torch.empty(size, dtype=dtype, device=first.device) if same else None  # kept during sleep
        fused = self.arena.empty(dtype, *size) if adopted is None else adopted
        for part, parameter in zip(fused.split([len(each) for each in parameters]), parameters, strict=True):
            part.copy_(parameter.detach())
            if same:
                parameter.data = part
                self.shared.append((part, parameter))
            else:
                self.copied.append((part, parameter))
        return fused

    @torch.no_grad()
    def refresh(self) -> bool:
        """Copies the parameters' values in place. Returns False if a shared parameter was moved or an adapter was
        replaced: then new weights must be made."""
        if self._list_adapters() != self._adapters:
            return False
        if self.padded:
            torch._foreach_zero_(self.padded)  # their memory may have been unmapped
        for copy, linear in self.scaled:
            (adapter,) = lora_adapters(linear)
            torch.mul(adapter.up, adapter.scaling, out=copy)  # in float32, then narrowed
        if self.copied:
            torch._foreach_copy_([copy for copy, _ in self.copied], [each.detach() for _, each in self.copied])
        return all(view.data_ptr() == each.data_ptr() for view, each in self.shared)

    def _list_adapters(self) -> list[list[int]]:
        """The adapters of each projection by id, since parameters compare their elements."""
        linears = [linear for layer in self._modules for _, linear in projections(layer)]
        return [[id(adapter.low) for adapter in lora_adapters(linear)] for linear in linears]

    def angles(self, positions: int) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin [positions, width / 2] for each kind of layers: a generated token has one position, whatever the
        family."""
        made = {}
        for kind, (frequencies, scale) in self._rotary.items():
            angle = torch.arange(positions, device=frequencies.device)[:, None].float() * frequencies
            made[kind] = (angle.cos() * scale).to(self.dtype), (angle.sin() * scale).to(self.dtype)
        return made


def find_embed_scale(embedding: Any, dtype: torch.dtype) -> float | None:
    """The factor of embeddings as the model rounds it; None if there is none."""
    scale = getattr(embedding, "embed_scale", None)
    return None if scale is None else float(scale.to(embedding.weight.dtype).to(dtype))


def join_adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters as one tensor without a copy, if they are adjacent in memory: a single one is, and so are those
    that earlier weights fused."""
    first = parameters[0].detach()
    memory, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for each in parameters:
        if not each.is_contiguous() or (each.untyped_storage().data_ptr(), each.data_ptr()) != (memory, address):
            return None
        address += each.nbytes
    return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
