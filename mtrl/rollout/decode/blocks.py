"""The blocks of a layer: each reads the normed hidden states of a step's rows and writes what is added to them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mtrl.rollout.decode.buffers import CHUNK, PIECE, PIECES, AttentionPieces, Buffers, Pairs, SlotTable
from mtrl.rollout.decode.fused_weights import (
    AttentionWeights,
    DecodeWeights,
    MlpWeights,
    Projection,
    RecurrenceWeights,
)
from mtrl.rollout.decode.layers import Attention, Mixture, Mlp, Recurrence

BLOCK = 32  # keys at a time


class Block(Protocol):
    """A kind of block, for all layers that have it."""

    def run(self, i: int, x: Tensor, out: Tensor) -> None:
        """From [rows, hidden] to [rows, hidden], in layer i."""


class Workspace:
    """What the blocks of a step share: its rows, its operations, and memory for what no later block reads."""

    def __init__(self, weights: DecodeWeights, buffers: Buffers, rows: int, do: Any) -> None:
        self.weights, self.buffers, self.rows, self.do = weights, buffers, rows, do
        self.slot_table = SlotTable(rows, buffers.room, buffers.device)
        self.low = self.empty("low", weights.rank) if weights.rank else None

    def empty(self, name: str, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, *size]: blocks that ask for the same name share it."""
        return self.buffers.scratch(name, dtype or self.weights.dtype, self.rows, *size)

    def multiply(self, x: Tensor, projection: Projection, out: Tensor) -> None:
        product(x, projection, out, None if self.low is None else self.low.flatten())


class AttentionBlock:
    def __init__(self, space: Workspace, kind: Attention) -> None:
        self.space, self.kind, buffers = space, kind, space.buffers
        self.qkv = space.empty("qkv", kind.qkv)
        self.query = space.empty("query", kind.heads, kind.head_dim)
        self.attended = space.empty("attended", kind.out)
        pieces = (buffers.room.pieces, space.rows, kind.heads)
        part = buffers.scratch("part", torch.float32, *pieces, kind.head_dim)
        lse = buffers.scratch("lse", torch.float32, *pieces)
        self.pieces = AttentionPieces(buffers.room.pieces_of_prompt, PIECE, PIECES, CHUNK, BLOCK, part, lse)

    def run(self, i: int, x: Tensor, out: Tensor) -> None:
        space, kind, buffers = self.space, self.kind, self.space.buffers
        weights, cache, rows, do, table = (
            space.weights.layers[i].mixer, buffers.cache[i], buffers.rows, space.do, space.slot_table
        )  # fmt: skip
        assert isinstance(weights, AttentionWeights)
        angles, norm = buffers.angles[kind.positions], space.weights.shape.norm
        space.multiply(x, weights.qkv, self.qkv)
        do.rotate_write(self.qkv, weights, kind, norm, angles, table.slot, rows, self.query, *cache.own)
        do.attend(self.query, self.qkv, kind, cache, table, rows, self.pieces, self.attended)
        space.multiply(self.attended, weights.out, out)


class RecurrentBlock:
    def __init__(self, space: Workspace, kind: Recurrence) -> None:
        self.space, self.kind = space, kind
        self.projected, self.mixed = space.empty("projected", kind.projected), space.empty("mixed", kind.mixed)
        self.read, self.gated = space.empty("read", kind.values), space.empty("gated", kind.values)

    def run(self, i: int, x: Tensor, out: Tensor) -> None:
        space, kind, do, table = self.space, self.kind, self.space.do, self.space.slot_table
        weights, states = space.weights.layers[i].mixer, space.buffers.states[i]
        assert isinstance(weights, RecurrenceWeights)
        space.multiply(x, weights.projected, self.projected)
        do.convolve(self.projected, weights.convolution, states, table, kind, self.mixed)
        do.update_state(self.mixed, self.projected, weights, states, table, kind, self.read)
        do.gated_norm(self.read, self.projected, weights.norm, kind, space.weights.shape.norm.eps, self.gated)
        space.multiply(self.gated, weights.out, out)


class MlpBlock:
    def __init__(self, space: Workspace, kind: Mlp, of: str = "") -> None:
        """`of`: whose memory it is; an MLP of another width has its own."""
        self.space, self.kind = space, kind
        self.both, self.inner = space.empty(f"{of}both", 2 * kind.inner), space.empty(f"{of}inner", kind.inner)

    def run(self, i: int, x: Tensor, out: Tensor) -> None:
        weights = self.space.weights.layers[i].mlp
        assert isinstance(weights, MlpWeights)
        self.multiply(weights, x, out)

    def multiply(self, weights: MlpWeights, x: Tensor, out: Tensor) -> None:
        self.space.multiply(x, weights.gate_up, self.both)
        self.space.do.gate_mul(self.both, self.inner, self.kind.activation)
        self.space.multiply(self.inner, weights.down, out)


class MixtureBlock:
    """Chooses experts for each row and multiplies by theirs alone, in orders and sizes that a graph can capture."""

    def __init__(self, space: Workspace, kind: Mixture) -> None:
        self.space, self.kind, scratch, rows = space, kind, space.buffers.scratch, space.rows
        self.place = {i: place for place, i in enumerate(space.weights.shape.mixtures)}
        hidden, routed = space.weights.shape.hidden, torch.float32 if kind.sigmoid else space.weights.dtype
        self.wide = space.empty("routed x", hidden, dtype=routed) if routed != space.weights.dtype else None
        self.logits = space.empty("routed", kind.experts, dtype=routed)
        self.pairs = Pairs(
            space.empty("expert", kind.chosen, dtype=torch.int32),
            space.empty("expert weight", kind.chosen, dtype=routed),
            scratch("order", torch.int32, rows * kind.chosen),
            scratch("start", torch.int32, kind.experts + 1),
        )
        self.both, self.inner = (
            scratch(name, space.weights.dtype, rows * kind.chosen, width)
            for name, width in (("expert both", 2 * kind.inner), ("expert inner", kind.inner))
        )
        self.parts = scratch("parts", routed, rows * kind.chosen, hidden)  # products with the pairs' weights
        self.shared: tuple[MlpBlock, Tensor] | None = None
        if kind.shared:
            mlp = MlpBlock(space, Mlp(kind.shared, kind.activation), "shared ")
            self.shared = mlp, space.empty("shared", hidden)

    def run(self, i: int, x: Tensor, out: Tensor) -> None:
        space, do, pairs, table = self.space, self.space.do, self.pairs, self.space.slot_table
        weights: Any = space.weights.layers[i].mlp
        space.multiply(x if self.wide is None else self.wide.copy_(x), weights.router, self.logits)
        do.route(self.logits, weights.correction, self.kind, table, space.buffers.rows, self.place[i], pairs)
        do.order_pairs(pairs)
        do.multiply_pairs(x, weights.gate_up, pairs, self.both, weighted=False)
        do.gate_mul(self.both, self.inner, self.kind.activation)
        do.multiply_pairs(self.inner, weights.down, pairs, self.parts, weighted=True)
        shared = None
        if self.shared is not None:
            mlp, said = self.shared
            mlp.multiply(weights.shared.mlp, x, said)
            shared = said, weights.shared.gate
        do.merge_experts(self.parts, pairs, table, x, shared, out)


BLOCKS: dict[type, Any] = {Attention: AttentionBlock, Recurrence: RecurrentBlock, Mlp: MlpBlock, Mixture: MixtureBlock}


def make_blocks(space: Workspace) -> list[tuple[Block, Block]]:
    """The two blocks of each layer; layers of the same kind have the same ones."""
    made: dict[Any, Block] = {}

    def make(kind: Any) -> Block:
        if kind not in made:
            made[kind] = BLOCKS[type(kind)](space, kind)
        return made[kind]

    return [(make(layer.mixer), make(layer.mlp)) for layer in space.weights.shape.layers]


def product(x: Tensor, projection: Projection, out: Tensor, scratch: Tensor | None = None) -> None:
    """x @ weight.T plus the adapter's part; `scratch` has room for its rank in every row."""
    torch.mm(x, projection.weight.t(), out=out)
    if (adapter := projection.adapter) is not None:
        assert scratch is not None
        low = scratch[: len(x) * adapter.rank].view(len(x), adapter.rank)
        torch.mm(x, adapter.low.t(), out=low)
        out.addmm_(low, adapter.up.t())
