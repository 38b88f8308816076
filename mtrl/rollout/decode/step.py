"""One step of decoding, from the last token of every row to the next one, over static buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrl.rollout.decode.buffers import CHUNK, PIECE, PIECES, AttentionPieces, Buffers, Mode, SlotTable, Tiles
from mtrl.rollout.decode.fused_weights import DecodeWeights, LowRank

TILE = 64  # tokens of the vocabulary whose mass is summed
BLOCK = 32  # keys at a time


@dataclass(frozen=True)
class Ops:
    """The modules of everything but the matrix products: kernels, or `tests/torch_ops.py` for both."""

    layer: Any
    sampling: Any


def triton_ops() -> Ops:
    """The Triton kernels; raises ImportError if Triton is not installed."""
    from mtrl.rollout.decode import layer_kernels, sampling_kernels

    return Ops(layer_kernels, sampling_kernels)


class Step:
    """A step of up to `rows` rows. Everything it reads and writes has a fixed address, so a graph can capture it."""

    def __init__(self, weights: DecodeWeights, buffers: Buffers, rows: int, mode: Mode, ops: Ops) -> None:
        shape, dtype, make = weights.shape, weights.dtype, buffers.scratch
        self.weights, self.buffers, self.mode, self.ops = weights, buffers, mode, ops
        self.slot_table = SlotTable(rows, buffers.room, buffers.device)
        self.residual, self.normed = (make(name, dtype, rows, shape.hidden) for name in ("residual", "normed"))
        self.qkv = make("qkv", dtype, rows, shape.qkv)
        self.query = make("query", dtype, rows, shape.heads, shape.head_dim)
        self.attended = make("attended", dtype, rows, shape.heads * shape.head_dim)
        self.update = make("update", dtype, rows, shape.hidden)
        self.both, self.inner = make("both", dtype, rows, 2 * shape.inner), make("inner", dtype, rows, shape.inner)
        self.low = make("low", dtype, rows * weights.rank) if weights.rank else None
        self.raw = make("raw", dtype, rows, shape.vocabulary)
        self.logits = make("logits", torch.float32, rows, shape.vocabulary) if mode.cuts else None
        self.cut = make("cut", torch.float32, rows)
        tiles = -(-shape.vocabulary // TILE)
        self.tiles = Tiles(TILE, make("top", torch.float32, rows, tiles), make("mass", torch.float32, rows, tiles))
        pieces = (buffers.room.pieces, rows, shape.heads)
        part, lse = make("part", torch.float32, *pieces, shape.head_dim), make("lse", torch.float32, *pieces)
        self.pieces = AttentionPieces(buffers.room.pieces_of_prompt, PIECE, PIECES, CHUNK, BLOCK, part, lse)

    def run(self) -> None:
        self.read()
        self.sample()

    def read(self) -> None:
        """Reads the rows' last tokens through all layers: `normed` is their last hidden state."""
        weights, rows, do = self.weights, self.buffers.rows, self.ops.layer
        eps, layers = weights.shape.eps, weights.layers
        do.embed_norm(
            self.slot_table.slot, rows.token, weights.embed, layers[0].norm, self.residual, self.normed, eps
        )  # fmt: skip
        following = [layer.norm for layer in layers[1:]] + [weights.norm]
        for i, layer in enumerate(layers):
            product(self.normed, layer.qkv, self.qkv, layer.qkv_adapter, self.low)
            self._attend(i)
            product(self.attended, layer.out, self.update, layer.out_adapter, self.low)
            do.add_norm(self.update, self.residual, layer.mlp_norm, self.normed, eps)
            product(self.normed, layer.gate_up, self.both, layer.gate_up_adapter, self.low)
            do.silu_mul(self.both, self.inner)
            product(self.inner, layer.down, self.update, layer.down_adapter, self.low)
            do.add_norm(self.update, self.residual, following[i], self.normed, eps)

    def _attend(self, i: int) -> None:
        shape, layer, do = self.weights.shape, self.weights.layers[i], self.ops.layer
        buffers, cache = self.buffers, self.buffers.cache
        own = cache.own_keys[i], cache.own_values[i]
        angles = buffers.cos, buffers.sin
        do.rotate_write(self.qkv, layer, shape, angles, self.slot_table.slot, buffers.rows, self.query, *own)
        prompts = cache.prompt_keys[i], cache.prompt_values[i]
        do.attend(self.query, prompts, own, self.slot_table, buffers.rows, shape, self.pieces, self.attended)

    def sample(self) -> None:
        """Samples a token for every row from `normed`."""
        rules, do, mode = self.buffers.rules, self.ops.sampling, self.mode
        product(self.normed, self.weights.head, self.raw)
        do.tile_masses(self.raw, rules, self.logits, self.tiles)
        if self.logits is not None:
            do.find_cut(self.logits, rules, mode, self.tiles, self.cut)
            do.cut_masses(self.logits, self.cut, rules, self.tiles)
        logits = self.raw if self.logits is None else self.logits
        do.pick(logits, self.tiles, rules, mode, self.slot_table.slot, self.buffers.rows, raw=self.logits is None)


def product(
    x: Tensor, weight: Tensor, out: Tensor, adapter: LowRank | None = None, scratch: Tensor | None = None
) -> None:  # fmt: skip
    """x @ weight.T plus the adapter's part; `scratch` has room for its rank in every row."""
    torch.mm(x, weight.t(), out=out)
    if adapter is not None:
        assert scratch is not None
        low = scratch[: len(x) * adapter.rank].view(len(x), adapter.rank)
        torch.mm(x, adapter.low.t(), out=low)
        out.addmm_(low, adapter.up.t())
