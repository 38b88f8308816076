"""Whole groups into optimizer steps, ranks and micro-batches.

A group stays whole wherever it fits, because its rows share their prompt; only a group over the token budget is cut.
The unit of cost is what a pass really computes: with a shared prefix the prompt once and every response, else the
prompt with each response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.groups import group_count
from mtrl.utils.seeding import rng_for


@dataclass(frozen=True)
class Piece:
    """Rows of one group that share a pass, and the tokens it takes."""

    rows: tuple[int, ...]
    tokens: int


def optimizer_steps(group: Tensor, prompts_per_step: int, key: Sequence[int | str] = ()) -> list[Tensor]:
    """Row indices of each optimizer step: whole groups, `prompts_per_step` of them a step, in an order drawn by the key
    (without one, in their own). The rows of a step stay in their order: one step of all groups is the same for any key.
    """
    groups = group_count(group)
    order = torch.from_numpy(rng_for(*key).permutation(groups)) if key else torch.arange(groups)
    parts = order.split(prompts_per_step) if groups else ()
    return [torch.nonzero(torch.isin(group, chosen)).flatten() for chosen in parts]


def cut_groups(
    group: Tensor, response_tokens: Tensor, prompt_tokens: Sequence[int], budget: int, share_prefix: bool = True
) -> list[Piece]:
    """One piece a group; more where a group is over the budget. A single row over the budget is a piece of its own."""
    pieces, lengths = [], response_tokens.tolist()
    rows_of = group.argsort(stable=True).split(group.bincount().tolist())  # looked for once, not once a group
    for prompt, of_group in zip(prompt_tokens, rows_of, strict=False):
        rows: list[int] = []
        tokens = 0
        for row in of_group.tolist():
            response = int(lengths[row])
            cost = response if share_prefix and rows else prompt + response
            if rows and tokens + cost > budget:
                pieces.append(Piece(tuple(rows), tokens))
                rows, tokens, cost = [], 0, prompt + response
            rows.append(row)
            tokens += cost
        if rows:
            pieces.append(Piece(tuple(rows), tokens))
    return pieces


def fill_micro_batches(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Pieces into as few micro-batches as first-fit decreasing finds; none over the budget but single pieces."""
    batches: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        place = next((i for i, left in enumerate(room) if piece.tokens <= left), None)
        if place is None:
            batches.append([piece])
            room.append(budget - piece.tokens)
        else:
            batches[place].append(piece)
            room[place] -= piece.tokens
    return batches


def balance(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """Pieces over ranks, the heaviest first to the lightest rank, so that no rank waits long for another."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        lightest = load.index(min(load))
        shares[lightest].append(piece)
        load[lightest] += piece.tokens
    return shares


def row_index(pieces: Sequence[Piece]) -> Tensor:
    """The rows of some pieces, ascending: an index for `TrainBatch.rows`."""
    return torch.tensor(sorted(row for piece in pieces for row in piece.rows), dtype=torch.int64)
