"""Attention masses on the pools of a prompt, from queries, keys and the lse of their attention.

A mass is a sum of probabilities exp(score - lse) over some keys of the prompt. With the lse at hand the values, the
response's own keys and the outputs are not needed: attention over indicators of the pools would compute all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.models.device_copy import to_device
from mtrl.models.document_mask import DocumentMask

ROWS = 128  # of a block
POOLS = 16  # columns of a product, at the least


@dataclass(frozen=True, eq=False)
class PromptRows:
    """M rows of the attention matrix of one packed sequence, and the keys of their prompts that they see."""

    column: Tensor  # [M]
    begin: Tensor  # [M] the first key
    end: Tensor  # [M] after the last one
    blocks: Tensor  # [blocks, ROWS] which of the M; -1: none. The rows of a block have the same prompt.

    @classmethod
    def of(cls, documents: DocumentMask, column: Tensor, device: torch.device) -> PromptRows:
        segment, prompt = documents.segment[0], documents.prompt[0][column]
        sizes = torch.bincount(segment[segment >= 0])  # segments are numbered in the order of their columns
        begin = (sizes.cumsum(0) - sizes)[prompt]
        end = torch.minimum(begin + sizes[prompt], column + 1)
        parts = (each.int() for each in (column, begin, end, fill_blocks(begin)))
        return cls(*(to_device(each, device) for each in parts))


def fill_blocks(group: Tensor) -> Tensor:
    """[blocks, ROWS]: the rows of each group in blocks of their own, the last one of a group filled up with -1."""
    _, group, counts = group.unique(return_inverse=True, return_counts=True)
    room = -(-counts // ROWS) * ROWS
    moved = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)
    blocks = torch.full((int(room.sum()),), -1)
    blocks[torch.arange(len(group)) + moved.repeat_interleave(counts)] = group.argsort(stable=True)
    return blocks.view(-1, ROWS)


def prompt_masses(query: Tensor, key: Tensor, lse: Tensor, pools: Tensor, rows: PromptRows, scale: float) -> Tensor:
    """[M, pools]: the mass on each pool, as the mean over heads. Queries and keys are [heads, S, D], lse [heads, S] and
    `pools` [S, pools] 0 or 1."""
    from mtrl.models import mass_kernel  # Triton is not everywhere

    used = pools.shape[1]
    indicator = torch.nn.functional.pad(pools.to(key.dtype), (0, POOLS - used))
    out = torch.empty(len(key), len(rows.column), POOLS, device=query.device)
    mass_kernel.launch(query, key, lse, indicator, rows.blocks, rows.column, rows.begin, rows.end, out, scale)
    return out[..., :used].sum(0) / len(query)
