"""Bytes that one rank holds of sharded models (`models/parallel/fsdp.py`), by formula.

docs/scaling.md has the formulas; `tests/cluster/test_ranked_sizes.py` compares them with live ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtrl.models.parallel.fsdp import find_units

REDUCED = 4  # bytes of a number while gradients are reduced
GATHERED_LAYERS = 2  # at once: one computes, the next one is in transit


@dataclass(frozen=True)
class Split:
    """How weights are sharded; by default a single process holds them."""

    ranks: int = 1  # with their own rows
    parts: int = 1  # shards of each weight
    stays_gathered: bool = False  # between a forward pass and its backward pass (SHARD_GRAD_OP)
    cpu_offload: bool = False  # weights, gradients and optimizer state are in CPU memory
    own_engine: bool = False  # with a full copy of the policy, for sampling

    def local_sizes(self, tensors: Iterable[int]) -> list[int]:
        """Numbers of each tensor that the rank with the largest shard keeps on its device."""
        return [] if self.cpu_offload else [-(-numbers // self.parts) for numbers in tensors]


def gathered_weights(model: Any, split: Split, width: int, whole: Collection[Tensor] = ()) -> int:
    """Bytes of weights gathered in a pass that computes in `width` bytes: parameters outside of layers for the whole
    pass, and layers one after the other; those that every rank has `whole` are not."""
    layers, rest = layer_sizes(model, but=whole)
    return width * (rest + (sum(layers) if split.stays_gathered else GATHERED_LAYERS * max(layers)))


def gathered_gradients(model: Any, width: int) -> int:
    """Bytes of unsharded gradients: those of a layer until they are reduced, those outside of layers until the end; and
    the buffers of the reduction."""
    layers, rest = layer_sizes(model, learning=True)
    return (width + REDUCED) * (rest + max(layers))


def layer_sizes(model: Any, learning: bool = False, but: Collection[Tensor] = ()) -> tuple[list[int], int]:
    """Parameters in each layer, and in total outside of layers."""
    left_out = set(map(id, but))

    def count(module: Any) -> int:
        return sum(
            p.numel() for p in module.parameters() if (p.requires_grad or not learning) and id(p) not in left_out
        )

    layers = [count(unit) for unit in find_units(model)]
    return layers, count(model) - sum(layers)
