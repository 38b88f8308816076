"""What one rank holds of models that several have split between them (`models/parallel/fsdp.py`), in bytes, by formula.

docs/scaling.md has the formulas; `tests/cluster/test_ranked_sizes.py` counts them on live ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mtrl.models.parallel.fsdp import units

REDUCED = 4  # bytes of a number while gradients are summed
AHEAD = 2  # layers that are whole at once: one at work, and the next one on its way


@dataclass(frozen=True)
class Split:
    """How weights are split. By default they are not: a process is alone."""

    ranks: int = 1  # that have rows of their own
    parts: int = 1  # that each weight is split into
    stays_whole: bool = False  # between a forward pass and its backward pass (SHARD_GRAD_OP)
    in_main_memory: bool = False  # weights, gradients and optimizer state
    own_engine: bool = False  # a whole copy of the policy, for sampling

    def share(self, tensors: Iterable[int]) -> list[int]:
        """Numbers of each tensor that are on the device of the rank that holds most of it, all the time."""
        return [] if self.in_main_memory else [-(-numbers // self.parts) for numbers in tensors]


def whole_in_a_pass(model: Any, split: Split, width: int) -> int:
    """Bytes of weights that are whole while a model computes in numbers of that width: what is outside of layers for
    the length of the pass, and layers one after the other."""
    layers, rest = sizes(model)
    return width * (rest + (sum(layers) if split.stays_whole else AHEAD * max(layers)))


def whole_gradients(model: Any, width: int) -> int:
    """Bytes of gradients that are whole: of a layer until they are summed, of what is outside of layers until the end;
    and the numbers that are sent for it."""
    layers, rest = sizes(model, learning=True)
    return (width + REDUCED) * (rest + max(layers))


def sizes(model: Any, learning: bool = False) -> tuple[list[int], int]:
    """Numbers in each layer, and in all that is outside of them."""
    counted = [p for p in model.parameters() if p.requires_grad or not learning]
    layers = [sum(p.numel() for p in unit.parameters() if p.requires_grad or not learning) for unit in units(model)]
    return layers, sum(p.numel() for p in counted) - sum(layers)
