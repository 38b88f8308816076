"""One step of decoding, from the last token of every row to the next one, over static buffers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mtrl.rollout.decode.blocks import Workspace, make_blocks
from mtrl.rollout.decode.buffers import Buffers, Mode, Tiles
from mtrl.rollout.decode.fused_weights import DecodeWeights

TILE = 64  # tokens of the vocabulary whose mass is summed


@dataclass(frozen=True)
class Ops:
    """The functions of everything but the matrix products: kernels, or `tests/torch_ops.py` for both."""

    layer: Any
    sampling: Any


def triton_ops() -> Ops:
    """The Triton kernels; raises ImportError if Triton is not installed."""
    from mtrl.rollout.decode import expert_kernels, layer_kernels, recurrent_kernels, sampling_kernels

    of_layers = vars(layer_kernels) | vars(recurrent_kernels) | vars(expert_kernels)
    return Ops(SimpleNamespace(**of_layers), sampling_kernels)


class Step:
    """A step of up to `rows` rows. Everything it reads and writes has a fixed address, so a graph can capture it."""

    def __init__(self, weights: DecodeWeights, buffers: Buffers, rows: int, mode: Mode, ops: Ops) -> None:
        self.weights, self.buffers, self.mode, self.ops = weights, buffers, mode, ops
        shape, space = weights.shape, Workspace(weights, buffers, rows, ops.layer)
        self.slot_table = space.slot_table
        self.residual, self.normed, self.update = (
            space.empty(name, shape.hidden) for name in ("residual", "normed", "update")
        )
        self.blocks = make_blocks(space)
        self.raw = space.empty("raw", shape.vocabulary)
        self.logits = space.empty("logits", shape.vocabulary, dtype=torch.float32) if mode.cuts else None
        self.cut = buffers.scratch("cut", torch.float32, rows)
        tiles = -(-shape.vocabulary // TILE)
        self.tiles = Tiles(TILE, *(space.empty(name, tiles, dtype=torch.float32) for name in ("top", "mass")))

    def run(self) -> None:
        self.read()
        self.sample()

    def read(self) -> None:
        """Reads the rows' last tokens through all layers: `normed` is their last hidden state."""
        weights, do, norm = self.weights, self.ops.layer, self.weights.shape.norm
        layers, token = weights.layers, self.buffers.rows.token
        table, scale = weights.embed, weights.embed_scale
        do.embed_norm(
            self.slot_table.slot, token, table, layers[0].norm, self.residual, self.normed, norm, scale
        )  # fmt: skip
        following = [layer.norm for layer in layers[1:]] + [weights.norm]
        for i, (mixer, mlp) in enumerate(self.blocks):
            mixer.run(i, self.normed, self.update)
            do.add_norm(self.update, self.residual, layers[i].mlp_norm, self.normed, norm, layers[i].after_mixer)
            mlp.run(i, self.normed, self.update)
            do.add_norm(self.update, self.residual, following[i], self.normed, norm, layers[i].after_mlp)

    def sample(self) -> None:
        """Samples a token for every row from `normed`."""
        rules, do, mode = self.buffers.rules, self.ops.sampling, self.mode
        torch.mm(self.normed, self.weights.head.t(), out=self.raw)
        do.tile_masses(self.raw, rules, self.logits, self.tiles)
        if self.logits is not None:
            do.find_cut(self.logits, rules, mode, self.tiles, self.cut)
            do.cut_masses(self.logits, self.cut, rules, self.tiles)
        logits = self.raw if self.logits is None else self.logits
        do.pick(logits, self.tiles, rules, mode, self.slot_table.slot, self.buffers.rows, raw=self.logits is None)
