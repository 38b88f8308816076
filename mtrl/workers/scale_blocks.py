"""Blocks of an 8-bit optimizer state: which numbers share a scale, in one process and in the shards of ranks.

Blocks begin at multiples of BLOCK of the flattened parameter and end at the next one, or where the shard ends. So a
block is that of a single process unless a cut between shards runs through it. A single process has its scales in one
row; ranks have a row each, of a sharded tensor of the same width for all.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrl.models.parallel.fsdp import is_dtensor, local_tensor, shard_cuts, shard_place

BLOCK = 256  # numbers


def count_blocks(first: int, last: int) -> int:
    """Blocks of a shard that has these numbers of the flattened parameter.

    >>> count_blocks(0, 512), count_blocks(200, 512), count_blocks(200, 200)
    (2, 2, 0)
    """
    return -(-last // BLOCK) - first // BLOCK if first < last else 0


def block_edges(cuts: list[int]) -> Tensor:
    """Where the blocks of all shards begin, and the end of the last one.

    >>> block_edges([0, 300, 700]).tolist()
    [0, 256, 300, 512, 700]
    """
    return torch.cat([torch.arange(0, cuts[-1], BLOCK), torch.tensor(cuts)]).unique()


def make_scales(parameter: Tensor, own: Tensor | None = None) -> Tensor:
    """The scales of a parameter's blocks: `own` of this rank, by default zeros."""
    weights, (_, parts) = local_tensor(parameter), shard_place(parameter)
    cuts = shard_cuts(parameter.shape, parts)
    width = max(count_blocks(*shard) for shard in pairwise(cuts))
    scales = torch.zeros(width, device=weights.device)
    if own is not None:
        scales[: len(own)] = own
    if not isinstance(parameter, DTensor):
        return scales
    mesh, shape = parameter.device_mesh, torch.Size((parts, width))
    sharded = DTensor.from_local(
        scales[None], mesh, parameter.placements, run_check=False, shape=shape, stride=(width, 1)
    )
    local = local_tensor(sharded)  # from_local moves it to the mesh's devices; it belongs where the weights are
    local.data = local.to(weights.device)
    return sharded


def fit_scales(parameter: Tensor, numbers: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """The scales of a state that was read from a checkpoint of any number of ranks, for the blocks of this one; changes
    `numbers`, the state's bytes, where blocks were joined. `values`: what each byte stands for.

    A part of a block keeps its scale. Of joined blocks the largest scale counts, and the bytes of the others are
    rounded to it."""
    if is_dtensor(scales) or (scales.dim() == 1 and not is_dtensor(parameter)):
        return scales
    rows = scales.reshape(1, -1) if scales.dim() == 1 else scales
    number, parts = shard_place(parameter)
    before, now = (shard_cuts(parameter.shape, each) for each in (len(rows), parts))
    first, last = now[number], now[number + 1]
    own = count_blocks(first, last)
    if len(rows) == parts or first == last:
        return make_scales(parameter, rows[number, :own] if len(rows) == parts else None)
    counts = [count_blocks(*shard) for shard in pairwise(before)]
    saved = torch.cat([row[:count] for row, count in zip(rows.cpu(), counts, strict=True)])
    edges = torch.cat([block_edges(before), torch.tensor(now)]).clamp(first, last).unique()
    begins = edges[:-1]  # of the parts that both have
    old = saved[torch.searchsorted(block_edges(before), begins, right=True) - 1]
    blocks = begins // BLOCK - first // BLOCK
    new = torch.zeros(own).scatter_reduce(0, blocks, old, "amax", include_self=False)
    flat, middles = local_tensor(numbers).view(-1), (values[1:] + values[:-1]) / 2
    for index in (old != new[blocks]).nonzero().flatten().tolist():
        part = flat[edges[index] - first : edges[index + 1] - first]
        meant = values.to(part.device)[part.long()] * (old[index] / new[blocks[index]])
        part.copy_(torch.searchsorted(middles.to(part.device), meant))
    return make_scales(parameter, new.to(local_tensor(parameter).device))
