"""The language model's weights as decoding wants them: in the dtype of the products, and projections of one input as
one matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.rollout.decode.arena import arena_on
from mtrl.rollout.decode.layers import Shape, shape_of


@dataclass(frozen=True)
class Layer:
    norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class DecodeWeights:
    """Follows the parameters of `model`; call `refresh` after they have changed.

    A parameter that has this dtype already is not copied: alone it is used as it is, and one of several that are fused
    becomes a view of the fused matrix (the model adopts it). Whatever is copied lies in the arena and keeps its place,
    so graphs that read it stay valid; only a parameter that was moved elsewhere in the meantime makes them stale, and
    `refresh` says so.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        lm = getattr(model.model, "language_model", model.model)
        self.dtype, self.arena = dtype, arena_on(model.device)
        self.copied: list[tuple[Tensor, nn.Parameter]] = []  # a place here, and the parameter it follows
        self.shared: list[tuple[Tensor, nn.Parameter]] = []
        self.layers = [self._layer(layer) for layer in lm.layers]
        self.norm = self._follow(lm.norm.weight)
        self.embed = self._follow(lm.embed_tokens.weight)
        output = model.get_output_embeddings().weight
        self.head = self.embed if output is lm.embed_tokens.weight else self._follow(output)
        self.shape: Shape = replace(shape_of(lm), vocabulary=len(self.head))
        self._frequencies = lm.rotary_emb.inv_freq.float()
        self._rotary_scale = float(getattr(lm.rotary_emb, "attention_scaling", 1.0))
        self.refresh()

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        normed = hasattr(attention, "q_norm")
        return Layer(
            norm=self._follow(layer.input_layernorm.weight),
            qkv=self._follow(*(each.weight for each in projections)),
            bias=None if projections[0].bias is None else self._follow(*(each.bias for each in projections)),
            query_norm=self._follow(attention.q_norm.weight) if normed else None,
            key_norm=self._follow(attention.k_norm.weight) if normed else None,
            out=self._follow(attention.o_proj.weight),
            mlp_norm=self._follow(layer.post_attention_layernorm.weight),
            gate_up=self._follow(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=self._follow(mlp.down_proj.weight),
        )

    def _follow(self, *parameters: nn.Parameter) -> Tensor:
        """One tensor that is these parameters, one after the other."""
        same = all(each.dtype == self.dtype for each in parameters)
        if same and len(parameters) == 1 and parameters[0].is_contiguous():
            whole = parameters[0].detach()
            self.shared.append((whole, parameters[0]))
            return whole
        first = parameters[0]
        size = (sum(len(each) for each in parameters), *first.shape[1:])
        adopted = torch.empty(size, dtype=self.dtype, device=first.device) if same else None  # outlasts every sleep
        whole = self.arena.empty(self.dtype, *size) if adopted is None else adopted
        for place, parameter in zip(whole.split([len(each) for each in parameters]), parameters, strict=True):
            place.copy_(parameter.detach())
            if same:
                parameter.data = place
                self.shared.append((place, parameter))
            else:
                self.copied.append((place, parameter))
        return whole

    @torch.no_grad()
    def refresh(self) -> bool:
        """Takes over the parameters' values, in place. False where a shared one lives elsewhere: make new weights."""
        if self.copied:
            torch._foreach_copy_([place for place, _ in self.copied], [each.detach() for _, each in self.copied])
        return all(place.data_ptr() == each.data_ptr() for place, each in self.shared)

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, width / 2]: a generated token has one position, whatever the family."""
        angle = torch.arange(positions, device=self._frequencies.device)[:, None].float() * self._frequencies
        cos, sin = angle.cos() * self._rotary_scale, angle.sin() * self._rotary_scale
        return cos.to(self.dtype), sin.to(self.dtype)
