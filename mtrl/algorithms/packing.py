"""Whole groups into ranks and micro-batches.

A group stays whole if it fits, because its rows share their prompt; only a group over the token budget is split. The
cost is what a pass computes: the prompt once and every response with a shared prefix, else the prompt per response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Rows of one group that share a pass, and the tokens it takes."""

    rows: tuple[int, ...]
    tokens: int


def cut_groups(
    group: Tensor, response_tokens: Tensor, prompt_tokens: Sequence[int], budget: int, share_prefix: bool = True
) -> list[Piece]:
    """One piece per group, more if a group is over the budget. A single row over the budget is a piece by itself."""
    pieces, lengths = [], response_tokens.tolist()
    rows_by_group = group.argsort(stable=True).split(group.bincount().tolist())  # one pass, not one per group
    for prompt, group_rows in zip(prompt_tokens, rows_by_group, strict=False):
        rows: list[int] = []
        tokens = 0
        for row in group_rows.tolist():
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
    """Pieces into as few micro-batches as first-fit decreasing finds; none over the budget except single pieces."""
    batches: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        index = next((i for i, left in enumerate(room) if piece.tokens <= left), None)
        if index is None:
            batches.append([piece])
            room.append(budget - piece.tokens)
        else:
            batches[index].append(piece)
            room[index] -= piece.tokens
    return batches


def balance(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """Distribute pieces over ranks: the heaviest first, each to the lightest rank."""
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
