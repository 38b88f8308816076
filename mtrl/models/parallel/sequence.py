"""Ulysses sequence parallelism: the ranks of a group make every pass together, each with a part of every sequence.

Each rank holds an equal part of the positions. Everything that works position by position (embeddings, norms, MLPs,
adapters, deepstack) runs on that part alone. Attention needs all positions of a head: ranks exchange positions for
heads, attend over whole sequences with their share of the heads, and exchange back. The hidden states that predict
response tokens are then distributed evenly over the ranks for the output matrix, and the resulting number of each
token is gathered on all ranks.

So every rank of a group has the same log-probs and the same loss, and back-propagates the part of its own tokens:
summed over ranks, the gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrl.models.device_copy import to_device


@dataclass(frozen=True, eq=False)
class SequenceParallelGroup:
    """This rank in its sequence-parallel group; by default the only one. `group` is a process group of the device that
    computes."""

    group: Any = None
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # ------------------------------------------------------------------------------------------------------ positions
    def local_columns(self, length: int) -> slice:
        """The positions of this rank in sequences of this length."""
        assert length % self.size == 0, "sequences are padded to equal parts"
        return slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)

    def local_part(self, tensor: Tensor) -> Tensor:
        """[.., S] -> [.., S / size]"""
        return tensor if self.size == 1 else tensor[..., self.local_columns(tensor.shape[-1])]

    # ---------------------------------------------------------------------------------------------- heads in attention
    def gather_seq_scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, S / size, D] of all heads -> [B, heads / size, S, D] of all positions, in one exchange. If there
        are fewer key heads than ranks, each goes to all ranks whose queries read it."""
        copies = max(1, self.size // key.shape[1])
        key, value = (each.repeat_interleave(copies, 1) if copies > 1 else each for each in (key, value))
        by_rank = [each.unflatten(1, (self.size, -1)).movedim(1, 0) for each in (query, key, value)]
        received = self._exchange_equal(torch.cat(by_rank, 2))  # [ranks, B, heads of all three, S / size, D]
        whole = received.movedim(0, 2).flatten(2, 3).split([each.shape[2] for each in by_rank], 1)
        return whole[0], whole[1], whole[2]

    def gather_heads_scatter_seq(self, output: Tensor) -> Tensor:
        """[B, S, heads / size, D] -> [B, S / size, heads, D]: the inverse of `gather_seq_scatter_heads`."""
        by_rank = output.unflatten(1, (self.size, -1)).movedim(1, 0)  # [ranks, B, S / size, heads / size, D]
        return self._exchange_equal(by_rank).movedim(0, 2).flatten(2, 3)

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks, in place and without gradients."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
            values /= self.size
        return values

    # ---------------------------------------------------------------------------------------- tokens of the vocabulary
    def local_tokens(self, count: int) -> slice:
        """Which of `count` response tokens this rank scores."""
        each = -(-count // self.size)
        return slice(min(count, self.rank * each), min(count, (self.rank + 1) * each))

    def local_hidden(self, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """[own tokens, H]: the hidden states of this rank's tokens, exchanged between ranks that hold [B, S / size, H]
        each. `positions` are the sequence and column of every response token."""
        sequence, column = positions
        if self.size == 1:
            return hidden[to_device(sequence, hidden.device), to_device(column, hidden.device)]
        width, each = hidden.shape[1], -(-len(column) // self.size)
        held_by, goes_to = column // width, torch.arange(len(column)) // max(1, each)
        held = (held_by == self.rank).nonzero()[:, 0]  # in the order of their destinations
        from_ranks = held_by[self.local_tokens(len(column))]
        sent = hidden[to_device(sequence[held], hidden.device), to_device(column[held] % width, hidden.device)]
        counts = [torch.bincount(ranks, minlength=self.size).tolist() for ranks in (from_ranks, goes_to[held])]
        received: Tensor = _Exchange.apply(sent, self.group, *counts)
        order = from_ranks.argsort(stable=True)  # they arrive rank by rank
        return received[to_device(order.argsort(), hidden.device)]

    def gather_tokens(self, values: Tensor, count: int) -> Tensor:
        """[count, ..]: the numbers of every response token, from this rank's own tokens. Each rank back-propagates into
        its own alone, since the others have the same loss and do the same."""
        if self.size == 1:
            return values
        gathered: Tensor = _Gather.apply(values, self, count)
        return gathered

    def _exchange_equal(self, by_rank: Tensor) -> Tensor:
        """[size, ..]: a piece for each rank -> a piece from each rank."""
        received: Tensor = _Exchange.apply(by_rank, self.group, None, None)
        return received


NO_SEQUENCE_PARALLEL = SequenceParallelGroup()


def make_sp_group(size: int) -> SequenceParallelGroup:
    """The group of this rank, of `size` neighbouring ranks; all ranks must call this."""
    if size == 1:
        return NO_SEQUENCE_PARALLEL
    group, _ = dist.new_subgroups(size)
    return SequenceParallelGroup(group, dist.get_rank() % size, size)


def explain_indivisible_heads(heads: int, key_heads: int, sp_size: int) -> str | None:
    """Why the heads of a model cannot be divided among this many ranks; None if they can."""
    if heads % sp_size:
        return f"its {heads} attention heads cannot be divided among {sp_size} ranks; set a divisor of {heads}"
    if key_heads % sp_size and sp_size % key_heads:
        return (
            f"its {key_heads} heads of keys and values cannot be divided among {sp_size} ranks; set a divisor of "
            f"{key_heads}, or a multiple of it that divides the {heads} attention heads"
        )
    return None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, whose gradients go the same way back. `received` and `sent` count the rows of each rank;
    None: all have the same number."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.counts = group, (sent, received)
        return _exchange(rows, group, received, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.group, *ctx.counts), None, None, None


def _exchange(rows: Tensor, group: Any, received: Sequence[int] | None, sent: Sequence[int] | None) -> Tensor:
    output = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sp_group: SequenceParallelGroup, count: int) -> Tensor:
        ctx.own = sp_group.local_tokens(count)
        padded = torch.nn.functional.pad(
            values, [0, 0] * (values.ndim - 1) + [0, -(-count // sp_group.size) - len(values)]
        )
        gathered = [torch.empty_like(padded) for _ in range(sp_group.size)]
        dist.all_gather(gathered, padded, group=sp_group.group)
        return torch.cat(gathered)[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own], None, None
